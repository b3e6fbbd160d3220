"""Run the user's Python program as ``python`` itself would, and report to the agent why it failed."""

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
"""The flag of a nested function (``inspect.CO_NESTED``), and the prefix of opcodes that call functions."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep

_OWN_PROCESS = os.getpid()

MAX_ERROR = 2000
"""The largest number of characters of an exception's message that are reported."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any


# These two reports are formatted by hand, like `encode` does: its import would cost every program 2 ms.


def ready(cpus: list[int]) -> bytes:
    return f'{{"type":"ready","cpus":{cpus}}}\n'.encode()


def leaving(code: int) -> bytes:
    return f'{{"type":"leaving","code":{code}}}\n'.encode()


def main() -> None:
    report_fd = int(os.environ.pop(variables.REPORT_FD, "-1"))
    if report_fd >= 0:
        os.set_inheritable(report_fd, False)
    faulthandler.enable()
    _write_stacks_when_asked(os.environ.pop(variables.STACKS, ""))
    # Python buffers a pipe in blocks, but the user wants to see each line when it is printed.
    if not sys.stdout.line_buffering and not os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.excepthook = _hide_our_frames

    def report(line: bytes) -> None:
        if report_fd >= 0 and os.getpid() == _OWN_PROCESS:  # not a forked child of the program
            _write(report_fd, line)

    if report_fd >= 0:
        _write(report_fd, ready(sorted(os.sched_getaffinity(0))))
        loaded: dict[str, list[Callable[[Any], object]]] = {
            "torch": [lambda torch: report(_torch(torch))],
            "mpi4py.MPI": [_mpi_is_loaded],
        }
        sys.meta_path.insert(0, finder := _Finder(loaded))
        _take_over_port(finder.functions)
        _take_over_ledger(finder.functions)
        for reporter in ("reports", "observe.tracing", "observe.abort"):
            finder.functions[f"cpulaunch.runtime.{reporter}"] = [
                lambda module: setattr(module, "report", report)
            ]
    atexit.register(last := _BeforePythonEnds())  # registered first, so called last
    try:
        _run_to_its_end(sys.argv[1:])
    except SystemExit as error:
        last.status = _exit_code(error.code)
        ccl: Any = sys.modules.get("cpulaunch.ccl.create")
        if ccl is not None:
            ccl.has_failed = True
        # Report before the end: its connections may close long before, and other ranks would fail first.
        report(leaving(_exit_code(error.code)))
        raise
    except BaseException as error:
        last.status = 1
        # The launcher uses the ledger to tell whether another rank is the cause.  Errors of gloo name one of
        # its source files, such as "gloo/…".
        _keep_last_collectives(failed="gloo/" in str(error))
        report(_raised(error))
        raise
    report(leaving(0))


def _mpi_is_loaded(mpi: Any) -> None:
    """Warn if the ranks of the job are not those of an MPI world.

    They are only if the mpiexec of this MPI has started them.
    """
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if ranks > 1 and os.environ.get("RANK") == "0" and mpi.Is_initialized() and mpi.COMM_WORLD.size == 1:
        text = (
            f"cpulaunch: mpi4py: each of the {ranks} ranks is an MPI world of its own, since no mpiexec of "
            "its MPI has started them: --launcher mpirun does"
        )
        print(text, file=sys.stderr, flush=True)


def _write_stacks_when_asked(how: str) -> None:
    """Have faulthandler write all threads' stacks at a signal.  ``how`` is FD:SIGNAL, or empty for none."""
    if how:
        fd, number = map(int, how.split(":"))
        os.set_inheritable(fd, False)
        faulthandler.register(number, file=fd, all_threads=True)


def _take_over_port(when_loaded: dict[str, list[Callable[[Any], object]]]) -> None:
    """Take over the socket that keeps MASTER_PORT, if the agent has passed one (to the first rank)."""
    fd = os.environ.pop(variables.KEPT_PORT_FD, None)
    if fd is None:
        return
    from cpulaunch.agent.program.master_port import KeptPort

    kept = KeptPort(int(fd), int(os.environ[variables.KEPT_PORT]))
    when_loaded["torch"].append(kept.torch_is_loaded)
    if "socket" in sys.modules:
        kept.socket_is_loaded(sys.modules["socket"])
    else:
        when_loaded["socket"] = [kept.socket_is_loaded]


def _take_over_ledger(when_loaded: dict[str, list[Callable[[Any], object]]]) -> None:
    """Map the rank's ledger once ``cpulaunch.ledger`` is imported, which happens only along with torch."""
    if (fd := int(os.environ.pop(variables.LEDGER_FD, "-1"))) >= 0:
        os.set_inheritable(fd, False)

        def take_over(_: Any) -> None:
            from cpulaunch.agent.program import ledger_file

            if os.getpid() == _OWN_PROCESS:
                ledger_file.take_over(fd)

        when_loaded["cpulaunch.ledger"] = [take_over]


class _BeforePythonEnds:
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
            # Their oneCCL aborts if an exception ends Python, and the exit code would be 134.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)


def _exit_code(said: object) -> int:
    """The exit code of ``sys.exit(said)``."""
    if said is None:
        return 0
    return said & 0xFF if isinstance(said, int) else 1


def _run_to_its_end(arguments: list[str]) -> None:
    try:
        _run(arguments)
    except SystemExit as error:
        if _exit_code(error.code) != 0:
            raise
    # Raise pending errors of ccl: a program that doesn't destroy its groups may not have seen them yet.
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
    """Whether ``path`` is a directory, a zip file or a .pyc file, all of which Python can run."""
    if os.path.isdir(path) or path.endswith(".pyc"):
        return True
    with open(path, "rb") as f:
        return f.read(4) == b"PK\3\4"


def _run_file(path: str) -> None:
    """Run a script as the module ``__main__``.

    The module stays, as threads may outlive the last line; ``runpy.run_path`` would remove it then.
    """
    module = type(sys)("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    with open(path, "rb") as f:
        code = compile(f.read(), path, "exec")
    exec(code, module.__dict__)


def _keep_last_collectives(*, failed: bool) -> None:
    """Copy the last collectives of other backends into the ledger, without waiting for the next regular copy.

    ``failed`` says that the last one has failed.
    """
    kept = sys.modules.get("cpulaunch.runtime.observe.ledger")
    for mirror in getattr(kept, "mirrors", ()):
        try:
            mirror.look(failed=True) if failed else mirror.look_before_end()
        except Exception:
            pass  # report the original exception instead


def _raised(error: BaseException) -> bytes:
    import traceback

    from cpulaunch.errors import CpulaunchError
    from cpulaunch.messages import Raised
    from cpulaunch.wire import encode

    shown = _hide(error).__traceback__
    frames = traceback.extract_tb(shown)
    user = next((f for f in reversed(frames) if _is_users(f.filename)), frames[-1] if frames else None)
    file, line = (user.filename, user.lineno) if user else (None, None)
    if isinstance(error, SyntaxError) and not frames:
        file, line = error.filename, error.lineno
    if file and file.startswith(os.getcwd() + os.sep):
        file = os.path.relpath(file)
    if isinstance(error, CpulaunchError):  # the user's mistake, not a bug: no traceback
        text, hint = "", error.hint or ""
    else:
        # An error without frames is runpy's about a module: its cause has the frames.
        told = error if frames or error.__cause__ is None else error.__cause__
        text, hint = "".join(traceback.format_exception(type(told), told, told.__traceback__)), ""
    name = type(error).__qualname__
    if (module := type(error).__module__) not in ("builtins", "__main__"):
        name = f"{module}.{name}"
    first_line = str(error).partition("\n")[0]
    said = f"{name}: {first_line}"[:MAX_ERROR] if first_line else name
    return encode(Raised(said, file, line, text, hint, _cause(error)))


def _cause(error: BaseException | None) -> dict[str, Any] | None:
    """The cause that the error, or an error in its chain of causes and contexts, has recorded.

    Only usage errors and errors of ``ccl`` have one.
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
            pass  # an error that can't be shown
        error = error.__cause__ or error.__context__
    return None


def _write(fd: int, line: bytes) -> None:
    try:
        os.write(fd, line)
    except OSError:
        pass  # the agent is gone


def _torch(torch: Any) -> bytes:
    """The report that torch is loaded, with its number of threads.  Empty if another module has its name."""
    try:
        threads = torch.get_num_threads()
    except Exception:
        return b""
    from cpulaunch.messages import Torch
    from cpulaunch.wire import encode

    return encode(Torch(threads, os.environ.get("MKL_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")))


class _Finder:
    """A finder that calls ``functions[name]`` with the module ``name`` once another finder has loaded it."""

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
        for function in self.functions.pop(name, ()):  # once; not after a reload
            function(module)
        if not self.functions and self in sys.meta_path:
            sys.meta_path.remove(self)


def _is_users(file: str) -> bool:
    installed = ("site-packages", "dist-packages", os.path.dirname(os.__file__))
    ours = file.startswith(("<", _PACKAGE)) or file in _OURS
    return not ours and not any(part in file for part in installed)


def _hide_our_frames(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> Any:
    return sys.__excepthook__(kind, _hide(error.with_traceback(tb)), None)


def _hide(error: BaseException) -> BaseException:
    """Remove our frames from the tracebacks of an error, its causes and contexts.  Returns the error."""
    seen: set[int] = set()
    every: list[BaseException | None] = [error]
    while every:
        if (each := every.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = _without_our_frames(each.__traceback__)
            every += [each.__cause__, each.__context__]
    return error


def _without_our_frames(tb: TracebackType | None) -> TracebackType | None:
    """Remove frames that run the script, and frames of our functions that replace a library's."""
    kept: list[TracebackType] = []
    while tb is not None:
        code = tb.tb_frame.f_code
        stands_in = code.co_flags & _NESTED and code.co_filename.startswith(_PACKAGE)
        if code.co_filename not in _OURS and not (stands_in and (tb.tb_next or _calls(tb))):
            kept.append(tb)
        tb = tb.tb_next
    for one, following in zip(kept, [*kept[1:], None], strict=False):  # both may be empty
        one.tb_next = following
    return kept[0] if kept else None


def _calls(tb: TracebackType) -> bool:
    """Whether the frame was calling a function when the error occurred.

    For the innermost frame, the error then comes from a function of C, and not from the frame's own code.
    """
    from dis import opname

    return opname[tb.tb_frame.f_code.co_code[tb.tb_lasti]].startswith(_CALL)
