"""Run the user's Python program as ``python`` would, and report its errors to the agent."""

from __future__ import annotations

import atexit
import faulthandler
import os
import runpy
import sys

from cpulaunch import variables

_OURS = (
    __file__,
    os.path.join(os.path.dirname(__file__), "run_program.py"),
    runpy.__file__,
    "<frozen runpy>",
)

_NESTED, _CALL = 0x10, "CALL"
"""The flag of nested functions (``inspect.CO_NESTED``), and the prefix of opcodes that call functions."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep

_OWN_PROCESS = os.getpid()

MAX_ERROR = 2000
"""The largest length of a reported exception's message, in characters."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any


# The next two functions do the work of `encode`, whose import would cost every program 2 ms.


def ready_report(cpus: list[int]) -> bytes:
    return f'{{"type":"ready","cpus":{cpus}}}\n'.encode()


def leaving_report(code: int) -> bytes:
    return f'{{"type":"leaving","code":{code}}}\n'.encode()


def main() -> None:
    report_fd = int(os.environ.pop(variables.REPORT_FD, "-1"))
    if report_fd >= 0:
        os.set_inheritable(report_fd, False)
    faulthandler.enable()
    _register_faulthandler(os.environ.pop(variables.STACKS, ""))
    # By default, Python buffers its output to a pipe, but users want to see each line at once.
    if not sys.stdout.line_buffering and not os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.excepthook = _excepthook

    def report(line: bytes) -> None:
        if report_fd >= 0 and os.getpid() == _OWN_PROCESS:  # not a forked child of the program
            _write(report_fd, line)

    if report_fd >= 0:
        _write(report_fd, ready_report(sorted(os.sched_getaffinity(0))))
        loaded: dict[str, list[Callable[[Any], object]]] = {
            "torch": [lambda torch: report(_torch_report(torch))],
            "mpi4py.MPI": [_check_mpi_world],
        }
        sys.meta_path.insert(0, finder := _Finder(loaded))
        _take_over_port(finder.functions)
        _take_over_ledger(finder.functions)
        for reporter in ("reports", "observe.tracing", "observe.abort"):
            finder.functions[f"cpulaunch.runtime.{reporter}"] = [
                lambda module: setattr(module, "report", report)
            ]
    atexit.register(handler := _LastExitHandler())  # registered first, so called last
    try:
        _run_and_check(sys.argv[1:])
    except SystemExit as error:
        handler.status = _exit_code(error.code)
        ccl: Any = sys.modules.get("cpulaunch.ccl.create")
        if ccl is not None:
            ccl.has_failed = True
        # Report the exit code now.  Once the process closes its connections, other ranks would fail first.
        report(leaving_report(_exit_code(error.code)))
        raise
    except BaseException as error:
        handler.status = 1
        # The launcher uses the ledger to find out whether another rank is the cause.  The errors of gloo
        # contain the path of a source file, such as "gloo/…".
        _keep_last_collectives(failed="gloo/" in str(error))
        report(_error_report(error))
        raise
    report(leaving_report(0))


def _check_mpi_world(mpi: Any) -> None:
    """Warn if each rank is alone in its MPI world, because no mpiexec of this MPI has started it."""
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if ranks > 1 and os.environ.get("RANK") == "0" and mpi.Is_initialized() and mpi.COMM_WORLD.size == 1:
        text = (
            f"cpulaunch: mpi4py: each of the {ranks} ranks is an MPI world of its own, since no mpiexec of "
            "its MPI has started them: --launcher mpirun does"
        )
        print(text, file=sys.stderr, flush=True)


def _register_faulthandler(how: str) -> None:
    """Make faulthandler write all threads' stacks to FD at SIGNAL, if ``how`` is FD:SIGNAL."""
    if how:
        fd, number = map(int, how.split(":"))
        os.set_inheritable(fd, False)
        faulthandler.register(number, file=fd, all_threads=True)


def _take_over_port(on_import: dict[str, list[Callable[[Any], object]]]) -> None:
    """Take over the socket that reserves MASTER_PORT.  The agent passes one to rank 0."""
    fd = os.environ.pop(variables.KEPT_PORT_FD, None)
    if fd is None:
        return
    from cpulaunch.agent.program.master_port import KeptPort

    kept = KeptPort(int(fd), int(os.environ[variables.KEPT_PORT]))
    on_import["torch"].append(kept.torch_is_loaded)
    if "socket" in sys.modules:
        kept.socket_is_loaded(sys.modules["socket"])
    else:
        on_import["socket"] = [kept.socket_is_loaded]


def _take_over_ledger(on_import: dict[str, list[Callable[[Any], object]]]) -> None:
    """Map the rank's ledger when ``cpulaunch.ledger`` is imported.  Only programs with torch import it."""
    if (fd := int(os.environ.pop(variables.LEDGER_FD, "-1"))) >= 0:
        os.set_inheritable(fd, False)

        def take_over(_: Any) -> None:
            from cpulaunch.agent.program import ledger_file

            if os.getpid() == _OWN_PROCESS:
                ledger_file.take_over(fd)

        on_import["cpulaunch.ledger"] = [take_over]


class _LastExitHandler:
    """The last exit handler.  ``status`` is the program's exit code."""

    def __init__(self) -> None:
        self.status = 0

    def __call__(self) -> None:
        if "torch.distributed" in sys.modules:
            from cpulaunch.agent.program import gloo

            if os.getpid() == _OWN_PROCESS:
                gloo.let_gloo_finish()
            else:
                gloo.keep_groups()
        if self.status and "oneccl_bindings_for_pytorch" in sys.modules:
            # After an exception, their oneCCL would abort the process with exit code 134.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)


def _exit_code(code: object) -> int:
    """The exit code of ``sys.exit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _run_and_check(arguments: list[str]) -> None:
    try:
        _run(arguments)
    except SystemExit as error:
        if _exit_code(error.code) != 0:
            raise
    # Raise pending errors of ccl, which the program may not have noticed yet.
    ccl: Any = sys.modules.get("cpulaunch.ccl._group")
    if ccl is not None:
        ccl.check_calls()


def _run(arguments: list[str]) -> None:
    safe_path = getattr(sys.flags, "safe_path", False)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        if _is_bundle(arguments[0]):
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            if not safe_path:
                sys.path.insert(0, os.path.dirname(os.path.realpath(arguments[0])))
            _run_file(os.path.abspath(arguments[0]))


def _is_bundle(path: str) -> bool:
    """Whether ``path`` is a directory, a zip file or a .pyc file."""
    if os.path.isdir(path) or path.endswith(".pyc"):
        return True
    with open(path, "rb") as f:
        return f.read(4) == b"PK\3\4"


def _run_file(path: str) -> None:
    """Run a script as the module ``__main__``.

    The module remains after the last line, because threads may still run; ``runpy.run_path`` would remove it.
    """
    module = type(sys)("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    with open(path, "rb") as f:
        code = compile(f.read(), path, "exec", dont_inherit=True)  # not this module's annotations
    exec(code, module.__dict__)


def _keep_last_collectives(*, failed: bool) -> None:
    """Copy the last collectives of other backends into the ledger now.

    ``failed`` says that the last collective has failed.
    """
    observer = sys.modules.get("cpulaunch.runtime.observe.ledger")
    for mirror in getattr(observer, "mirrors", ()):
        try:
            mirror.look(failed=True) if failed else mirror.look_before_end()
        except Exception:
            pass  # report the original exception instead


def _error_report(error: BaseException) -> bytes:
    import traceback

    from cpulaunch.errors import CpulaunchError
    from cpulaunch.messages import Raised
    from cpulaunch.wire import encode

    tb = _remove_own_frames(error).__traceback__
    frames = traceback.extract_tb(tb)
    user = next((f for f in reversed(frames) if _is_user_code(f.filename)), frames[-1] if frames else None)
    file, line = (user.filename, user.lineno) if user else (None, None)
    if isinstance(error, SyntaxError) and not frames:
        file, line = error.filename, error.lineno
    if file and file.startswith(os.getcwd() + os.sep):
        file = os.path.relpath(file)
    if isinstance(error, CpulaunchError):  # a mistake of the user needs no traceback
        text, hint = "", error.hint or ""
    else:
        # If a module can't be imported, runpy raises an error without frames; its cause has the frames.
        shown = error if frames or error.__cause__ is None else error.__cause__
        text, hint = "".join(traceback.format_exception(type(shown), shown, shown.__traceback__)), ""
    name = type(error).__qualname__
    if (module := type(error).__module__) not in ("builtins", "__main__"):
        name = f"{module}.{name}"
    first_line = str(error).partition("\n")[0]
    summary = f"{name}: {first_line}"[:MAX_ERROR] if first_line else name
    return encode(Raised(summary, file, line, text, hint, _cause(error)))


def _cause(error: BaseException | None) -> dict[str, Any] | None:
    """The recorded cause of an error, or of an error in its chain of causes and contexts.

    Only usage errors and errors of ``ccl`` have a recorded cause.
    """
    from cpulaunch.errors import UsageError

    if isinstance(error, UsageError):
        return {"kind": "usage_error"}
    ccl: Any = sys.modules.get("cpulaunch.ccl._group")
    seen: set[int] = set()
    while ccl is not None and error is not None and id(error) not in seen:
        seen.add(id(error))
        try:
            if cause := ccl.cause_of(str(error)):
                return dict(cause)
        except Exception:
            pass  # str(error) has failed
        error = error.__cause__ or error.__context__
    return None


def _write(fd: int, line: bytes) -> None:
    try:
        os.write(fd, line)
    except OSError:
        pass  # the agent is gone


def _torch_report(torch: Any) -> bytes:
    """The report about torch's number of threads; empty if ``torch`` is another module of that name."""
    try:
        threads = torch.get_num_threads()
    except Exception:
        return b""
    from cpulaunch.messages import Torch
    from cpulaunch.wire import encode

    return encode(Torch(threads, os.environ.get("MKL_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")))


class _Finder:
    """A finder that calls ``functions[name]`` after another finder has loaded the module ``name``."""

    def __init__(self, functions: dict[str, list[Callable[[Any], object]]]) -> None:
        self.functions = functions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.functions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec and spec.loader:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self.loaded(name, module, load(module))  # type: ignore[method-assign]
        return spec

    def loaded(self, name: str, module: Any, _: None) -> None:
        for function in self.functions.pop(name, ()):  # only the first time, not after a reload
            function(module)
        if not self.functions and self in sys.meta_path:
            sys.meta_path.remove(self)


def _is_user_code(file: str) -> bool:
    installed = ("site-packages", "dist-packages", os.path.dirname(os.__file__))
    ours = file.startswith(("<", _PACKAGE)) or file in _OURS
    return not ours and not any(part in file for part in installed)


def _excepthook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> Any:
    return sys.__excepthook__(kind, _remove_own_frames(error.with_traceback(tb)), None)


def _remove_own_frames(error: BaseException) -> BaseException:
    """Remove cpulaunch's frames from the tracebacks of an error, its causes and contexts."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        if (each := pending.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = _filter_frames(each.__traceback__)
            pending += [each.__cause__, each.__context__]
    return error


def _filter_frames(tb: TracebackType | None) -> TracebackType | None:
    """Remove frames that run the script, and frames of cpulaunch's replacements of library functions."""
    kept: list[TracebackType] = []
    while tb is not None:
        code = tb.tb_frame.f_code
        is_replacement = code.co_flags & _NESTED and code.co_filename.startswith(_PACKAGE)
        if code.co_filename not in _OURS and not (is_replacement and (tb.tb_next or _is_calling(tb))):
            kept.append(tb)
        tb = tb.tb_next
    for frame, next_frame in zip(kept, [*kept[1:], None], strict=False):  # both may be empty
        frame.tb_next = next_frame
    return kept[0] if kept else None


def _is_calling(tb: TracebackType) -> bool:
    """Whether the frame was calling a function when the error occurred.

    If it is the innermost frame, this function is written in C, and has raised the error.
    """
    from dis import opname

    return opname[tb.tb_frame.f_code.co_code[tb.tb_lasti]].startswith(_CALL)
