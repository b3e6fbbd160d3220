"""Compiles the group and the kernels for the installed torch.

Only the command line uses this, never a rank.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cpulaunch.ccl import installed
from cpulaunch.ccl.fetch import ELSEWHERE, Progress, fetch_wheel
from cpulaunch.ccl.installed import SOURCES, Built, Part
from cpulaunch.errors import HostError

_UNDEFINED = re.compile(r"undefined reference to [`']([^']+)'")  # GNU ld and gold
_JOB_MEMORY = 1536 << 20  # bytes: the layer's unit includes torch's headers
_CORE_LINK = (
    f"-Wl,-soname,{installed.FILES['core']}",
    f"-Wl,--version-script={SOURCES / 'core/exports.map'}",
)
TOOL_LIMIT = 900.0
"""Maximum seconds that a compiler may take for one file."""

_TICK = 1.0  # seconds between two updates of a terminal's last line
_NAMES = {
    "core": "the core",
    "layer": "torch's layer",
    "oneccl": "the oneCCL module",
    "kernels": "the kernels",
}
_VECTOR_FLAGS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
}
"""Kind of vector unit → instructions that torch also expects for this `ATEN_CPU_CAPABILITY`."""


class CompilerError(HostError):
    """A compiler that failed, or made what does not load: it would do so again."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and its own identification, such as ``g++-12.2.0``."""

    path: str
    identity: str


@dataclass(frozen=True)
class Unit:
    """Sources compiled together, because most of the time would go to headers that they share."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]


def build(
    progress: Progress = lambda step, detail: None,
    *,
    force: bool = False,
    oneccl: bool = False,
    patient: bool = True,
) -> Built:
    """Return the group for the installed torch, building whatever is missing.

    ``progress`` gets a few words about each step.  Builds of several processes wait for each other, and each
    part appears in the cache complete or not at all.  A later build reuses what an interrupted one has
    compiled. Only ``oneccl``, the module with oneCCL in it, needs the network.  Without ``patient``, it fails
    soon if the network does not answer, or did not within the last hour.

    Raises HostError if something is missing: torch, a compiler, Python's headers, the network, or a writable
    cache.
    """
    kinds = ("core", "layer", *(("oneccl",) if oneccl else ()))
    there = _build_missing(kinds, progress, force=force, patient=patient)
    if there.built is None:
        raise HostError(f"the ccl process group was built, and yet cannot be used: {there.problem}")
    return there.built


def build_kernels(
    progress: Progress = lambda step, detail: None, *, force: bool = False, patient: bool = True
) -> Part:
    """Return the kernels for the installed torch, built in the same way.  Needs no network.

    Without ``patient``, HostError is raised at once if this compiler has failed with these sources before.
    """
    there = installed.state()
    if force or there.part("kernels") is None:
        failure = _failure_file(there, check(there, ("kernels",)))
        if not patient:
            _raise_again(failure)
        try:
            there = _build_missing(("kernels",), progress, force=force)
        except CompilerError as e:
            failure.write_text(json.dumps(str(e).splitlines()))
            raise
        failure.unlink(missing_ok=True)
    kernels = there.part("kernels")
    if kernels is None:
        raise HostError(f"the kernels were built, and yet cannot be used: {there.kernels_problem}")
    return kernels


def _failure_file(there: installed.State, compiler: Compiler) -> Path:
    """Return the file, beside the parts, that tells of a failure with these sources, torch and compiler."""
    made_of = json.dumps([there.wanted["kernels"], compiler.path, compiler.identity])
    return installed.cache_directory() / f"failed-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.json"


def _raise_again(failure: Path) -> None:
    try:
        lines = json.loads(failure.read_text())
    except (OSError, ValueError):
        return
    raise HostError(
        f"{' '.join(line.strip() for line in lines[:2])} (an earlier run tried it; "
        "`cpulaunch ccl build` tries again)"
    )


def _build_missing(
    wanted: Sequence[str], progress: Progress, *, force: bool, patient: bool = True
) -> installed.State:
    def missing(there: installed.State) -> list[str]:
        return [kind for kind in wanted if force or there.part(kind) is None]

    there = installed.state()
    if not missing(there):
        return there
    compiler = check(there, wanted)
    try:
        with _lock(progress):
            there = installed.state()
            if kinds := missing(there):  # another process may just have built it
                _build(kinds, there, compiler, progress, patient=patient)
    except OSError as e:
        raise HostError(
            f"what is compiled can't be kept in {installed.cache_directory()}: {e.strerror or e}",
            hint="Name a directory of yours in XDG_CACHE_HOME.",
        ) from None
    return installed.state()


def check(there: installed.State, kinds: Sequence[str] = ("core", "layer")) -> Compiler:
    """Return the compiler for these parts.  Raises HostError if they can't be built."""
    if there.torch is None or not installed.is_supported(there.torch):
        of_group = "layer" in kinds
        raise HostError(
            f"{'the ccl process group' if of_group else 'the kernels'} cannot be built: {there.problem}",
            hint="Take `--backend gloo`." if of_group else "Take `--engine torch`.",
        )
    if "oneccl" in kinds and os.uname().machine != "x86_64":
        raise HostError(
            f"oneCCL exists for x86_64 only, this is {os.uname().machine}", hint="Take `--ccl-transport tcp`."
        )
    found = _compiler()
    if "layer" in kinds:
        _check_headers()
    return found


def _build(
    kinds: list[str], there: installed.State, compiler: Compiler, progress: Progress, *, patient: bool
) -> None:
    root = installed.cache_directory()
    for left in root.glob("building-*"):  # left by a killed build: this one has the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=root) as temporary:
        work = Path(temporary)
        oneccl = _oneccl(work, progress, patient=patient) if "oneccl" in kinds else work
        digests = {kind: installed.sources_digest(kind) for kind in kinds}
        units = {kind: _units(kind, there, oneccl) for kind in kinds}
        objects = _compile(units, compiler, root / "objects", work, progress)
        if any(installed.sources_digest(kind) != digests[kind] for kind in kinds):
            raise HostError(
                "cpulaunch's C++ sources were changed while they were compiled", hint="Build the group again."
            )
        progress("linking", "")
        made: dict[str, Part] = {}
        for kind in kinds:  # the core first: the others link to it
            part = _part(kind, there, compiler, work / kind)
            part.directory.mkdir()
            core = made.get("core") or there.part("core")
            _link(part, compiler, objects[kind], core, there, oneccl)
            if kind == "oneccl":
                shutil.copy(oneccl / "LICENSE.txt", part.directory / "LICENSE-oneCCL.txt")
            installed.write_record(part)
            made[kind] = part
        progress("loading it", "")
        _check_loading(made, there)
        for kind, part in made.items():
            _publish(part, root / _name(kind, part), work / f"replaced-{kind}")
    shutil.rmtree(root / "objects", ignore_errors=True)


def _part(kind: str, there: installed.State, compiler: Compiler, directory: Path) -> Part:
    return Part(
        kind,
        directory,
        "cache",
        compiler=compiler.identity,
        glibc=installed.glibc_version(),
        **there.wanted[kind],
    )


def _name(kind: str, part: Part) -> str:
    if kind == "kernels":
        return f"kernels-torch-{part.torch}-abi{part.abi}-{part.machine}-{part.sources}"
    if kind == "layer":
        return f"torch-{part.torch}-{part.python}-abi{part.abi}-{part.machine}-{part.sources}"
    return f"{kind}-{part.machine}-{part.sources}"


def _publish(part: Part, target: Path, aside: Path) -> None:
    if target.exists():
        target.rename(aside)
    part.directory.rename(target)


@contextmanager
def _lock(progress: Progress) -> Iterator[None]:
    root = installed.cache_directory()
    _make_private(root)
    with open(root / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another build", "")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_private(root: Path) -> None:
    """Create the cache's directories so that no other user can put a library there, whatever the umask."""
    root.mkdir(parents=True, exist_ok=True)
    for each in (root, root.parent):
        if each.stat().st_uid == os.geteuid():
            each.chmod(each.stat().st_mode & ~0o022)
    if open_to := installed.writable_by_others(root):
        raise HostError(
            f"what is compiled can't be kept in {root}: others may write to {open_to}",
            hint="Name a directory of yours in XDG_CACHE_HOME.",
        )


def _compiler() -> Compiler:
    wanted = os.environ.get("CXX", "g++")
    path = shutil.which(wanted)
    if path is None:
        raise HostError(
            f"no C++ compiler: there is no {wanted!r} on PATH", hint=f"Install g++ 11 or newer. {ELSEWHERE}"
        )
    version = subprocess.run(
        [path, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, timeout=60
    )
    return Compiler(path, f"{Path(path).name}-{version.stdout.split()[0] if version.stdout else 'unknown'}")


def _check_headers() -> None:
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        raise HostError(f"Python's headers are not installed: no Python.h in {include}",
                        hint=f"Install python3-dev or python3-devel. {ELSEWHERE}")  # fmt: skip


# --- compiling


def _units(kind: str, there: installed.State, oneccl: Path) -> list[Unit]:
    """Return a part's units.  Only code that computes or copies gets full optimization."""
    if kind == "core":
        return core_units()
    flags = ("-fPIC", "-fvisibility=hidden", "-pthread", f"-I{SOURCES / 'core'}")
    boundary = SOURCES / "core/boundary.cpp"
    own = tuple(sorted((SOURCES / kind).glob("*.cpp")))
    if kind == "oneccl":
        return [Unit(kind, (*own, boundary), ("-O2", "-std=c++17", *flags, f"-I{oneccl / 'include'}"))]
    if kind == "kernels":
        return _kernels_units(there)
    assert there.torch is not None
    of_layer = (*_pybind_names(there.torch), f"-I{SOURCES / 'layer'}", f"-I{sysconfig.get_path('include')}")
    return [Unit(kind, (*own, boundary), ("-O1", *flags, *_torch_flags(there), *of_layer))]


def _torch_flags(there: installed.State) -> tuple[str, ...]:
    assert there.torch is not None
    assert there.torch_directory is not None
    standard = "c++20" if installed.series(there.torch) >= (2, 10) else "c++17"
    include = there.torch_directory / "include"
    return (
        f"-std={standard}",
        f"-D_GLIBCXX_USE_CXX11_ABI={installed.torch_abi(there.torch_directory)}",
        f"-I{include}",
        f"-I{include / 'torch/csrc/api/include'}",
    )


def _kernels_units(there: installed.State) -> list[Unit]:
    """Return the unit of the operations, and one unit of their loops for each kind of vector unit."""
    loops = installed.KERNELS / "vector.cpp"
    operations = tuple(path for path in sorted(installed.KERNELS.glob("*.cpp")) if path != loops)
    flags = ("-fPIC", "-fvisibility=hidden", "-pthread", f"-I{installed.KERNELS}")
    units = [Unit("kernels", operations, ("-O2", "-fopenmp", *flags, *_torch_flags(there)))]
    for name in _VECTOR_FLAGS if os.uname().machine == "x86_64" else ("portable",):
        best = ("-O3", "-fno-math-errno", "-fno-trapping-math", *_VECTOR_FLAGS[name])
        units.append(
            Unit(f"kernels-{name}", (loops,), (*best, "-std=c++17", *flags, f"-DCPULAUNCH_VECTOR={name}"))
        )
    return units


def core_units() -> list[Unit]:
    """Return the core's units, for any compiler."""
    flags = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", f"-I{SOURCES / 'core'}")
    arithmetic = SOURCES / "core/arithmetic.cpp"
    others = tuple(path for path in sorted((SOURCES / "core").glob("*.cpp")) if path != arithmetic)
    return [Unit("core", others, ("-O2", *flags)), Unit("arithmetic", (arithmetic,), ("-O3", *flags))]


def _pybind_names(torch: str) -> list[str]:
    """Return pybind11's names: until 2.8, two extensions share classes only if these are the same in both."""
    if installed.series(torch) > (2, 8):
        return []
    question = (
        "import json, torch._C as c; print(json.dumps([getattr(c, '_PYBIND11_' + n, None)"
        " for n in ('COMPILER_TYPE', 'STDLIB', 'BUILD_ABI')]))"
    )
    # Disable our own hook, which would load what may be about to be built.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    asked = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, env=environment, timeout=300
    )
    if asked.returncode != 0:
        raise HostError(f"torch cannot be imported: {asked.stderr.strip().splitlines()[-1:]}")
    said = json.loads(asked.stdout.splitlines()[-1])
    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    return [
        f'-DPYBIND11_{name}="{value}"' for name, value in zip(names, said, strict=True) if value is not None
    ]


def jobs() -> int:
    """Return how many compilers this host has cores and memory for."""
    cores = len(os.sched_getaffinity(0))
    try:
        available = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        available = None
    memory = int(available[1]) * 1024 // _JOB_MEMORY if available else cores
    return max(1, min(cores, memory))


def _compile(
    units: dict[str, list[Unit]], compiler: Compiler, kept: Path, work: Path, progress: Progress
) -> dict[str, list[Path]]:
    """Return the objects of each part, reusing those of an interrupted build in the directory ``kept``."""
    kept.mkdir(exist_ok=True)
    objects = {kind: [kept / _key(unit, compiler, kind) for unit in units[kind]] for kind in units}
    all_units = [unit for kind in units for unit in units[kind]]
    all_objects = [path for kind in units for path in objects[kind]]
    missing = [(unit, to) for unit, to in zip(all_units, all_objects, strict=True) if not to.exists()]
    missing.sort(key=lambda each: each[0].name not in ("layer", "kernels"))  # the longest first
    step = "compiling " + " and ".join(_NAMES[kind] for kind in units)
    compilers = Tools()

    def compile_unit(unit: Unit, to: Path) -> None:
        partial = work / to.name
        try:
            source = _write_unit(unit, work)
            run_tool([compiler.path, *unit.flags, "-c", str(source), "-o", str(partial)], compilers)
            partial.rename(to)
        except HostError as e:  # the first failure is the cause; Ctrl-C also ends the compilers
            raise compilers.stop(e) from None

    with ThreadPoolExecutor(jobs()) as pool:
        try:
            running = {pool.submit(compile_unit, unit, to) for unit, to in missing}
            progress(step, "")
            while running:
                done, running = wait(running, timeout=_TICK, return_when="FIRST_COMPLETED")
                for future in done:
                    future.result()
                progress(step, f"{len(all_units) - len(running)} of {len(all_units)}")
        except BaseException:
            compilers.stop(HostError("the build was stopped"))
            raise
    return objects


def _key(unit: Unit, compiler: Compiler, kind: str) -> str:
    """Return a file name for a unit's object that changes with everything that it is made of."""
    # oneCCL's headers are in a temporary directory, with a new name each time.
    flags = [flag for flag in unit.flags if not flag.startswith("-I")]
    text = json.dumps([compiler.path, compiler.identity, installed.sources_digest(kind), flags])
    return f"{unit.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.o"


def build_core_elsewhere(command: Sequence[str], machine: str, directory: Path) -> Part:
    """Build a wheel's core in ``directory`` by a compiler for another kind of machine, such as zig's."""
    part = Part(
        "core", directory, "wheel", installed.sources_digest("core"), machine, Path(command[0]).name, glibc=""
    )
    with tempfile.TemporaryDirectory() as temporary:
        objects = []
        for unit in core_units():
            objects.append(str(Path(temporary, f"{unit.name}.o")))
            source = _write_unit(unit, Path(temporary))
            run_tool([*command, *unit.flags, "-c", str(source), "-o", objects[-1]])
        run_tool([*command, "-shared", "-o", str(part.file), *objects, "-Wl,-z,defs", "-Wl,-Bsymbolic",
                  "-Wl,--strip-debug", "-pthread", *_CORE_LINK])  # fmt: skip
    installed.write_record(part)
    return part


def _write_unit(unit: Unit, directory: Path) -> Path:
    path = directory / f"{unit.name}.cpp"
    path.write_text("".join(f'#include "{source}"\n' for source in unit.sources))
    return path


# --- linking


def _link(
    part: Part,
    compiler: Compiler,
    objects: Sequence[Path],
    core: Part | None,
    there: installed.State,
    oneccl: Path,
) -> None:
    # Without `-z defs` a shared library may lack symbols, which would only show in a rank.
    argv = [compiler.path, "-shared", "-o", str(part.file), *map(str, objects), "-Wl,-z,defs",
            "-Wl,-Bsymbolic", "-Wl,--strip-debug", "-pthread"]  # fmt: skip
    if part.kind == "core":
        run_tool([*argv, *_CORE_LINK])
        return
    assert there.torch_directory is not None
    torch = [f"-L{there.torch_directory / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    if part.kind == "kernels":
        # torch has loaded an OpenMP library, its own or another: a second one would have its own threads.
        openmp = _ignored(compiler, objects, ("GOMP_", "omp_"))
        run_tool([*argv, *openmp, *torch])
        return
    assert core is not None
    argv.append(str(core.file))  # by its soname: whichever file of that name is loaded first
    if part.kind == "oneccl":
        link_oneccl(argv, oneccl / "libccl.a")
        return
    # Python's own symbols come from the process that loads the module.
    run_tool([*argv, *_ignored(compiler, objects, ("Py", "_Py")), *torch, "-ltorch_python"])


def link_oneccl(argv: list[str], archive: Path) -> None:
    """Link with oneCCL's static library.  Raises HostError that names undefined symbols."""
    # Hide oneCCL's symbols: another copy of it, such as that of Intel's bindings, may be loaded too.
    run_tool([*argv, str(archive), "-Wl,--exclude-libs,ALL", "-lrt", "-ldl", "-lpthread"])


def _ignored(compiler: Compiler, objects: Sequence[Path], prefixes: tuple[str, ...]) -> list[str]:
    """Return options that leave undefined symbols with these prefixes to the loading process."""
    nm = run_tool([compiler.path, "-print-prog-name=nm"]).strip()  # a toolchain's nm may have a prefix
    listed = run_tool([nm, "--undefined-only", "--format=posix", *map(str, objects)])
    names = {line.split()[0] for line in listed.splitlines() if line}
    return [f"-Wl,--ignore-unresolved-symbol={name}" for name in sorted(names) if name.startswith(prefixes)]


def _check_loading(made: dict[str, Part], there: installed.State) -> None:
    """Load the linked libraries in a separate process.  Raises HostError if that fails."""
    known = (
        made if "kernels" in made else {kind: there.part(kind) for kind in ("core", "layer", "oneccl")} | made
    )
    parts = [known.get(kind) for kind in installed.FILES]
    core, layer, oneccl, kernels = (str(part.file) if part else "" for part in parts)
    program = (
        "import sys, ctypes; from pathlib import Path; from cpulaunch.ccl import core, load\n"
        "if sys.argv[1]: core.Core(Path(sys.argv[1]))\n"
        "if sys.argv[3]: ctypes.CDLL(sys.argv[3])\n"
        "if sys.argv[1] and sys.argv[2]: load.load_layer(Path(sys.argv[2]))\n"
        "if sys.argv[4]: import torch; torch.ops.load_library(sys.argv[4])"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    tried = subprocess.run(
        [sys.executable, "-c", program, core, layer, oneccl, kernels],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    if tried.returncode != 0:
        said = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
        raise CompilerError(f"what was compiled does not load: {said}", hint=ELSEWHERE)


def _oneccl(work: Path, progress: Progress, *, patient: bool = True) -> Path:
    """Return a directory with ``include``, ``libccl.a`` and ``LICENSE.txt`` of oneCCL's pinned wheel."""
    path = fetch_wheel(work, progress, patient=patient)
    target = work / "oneccl-wheel"
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            _, _, inside = name.partition(".data/data/")
            if inside.startswith("include/"):
                place = target / inside
            elif inside == "lib/ccl/cpu/lib/libccl.a" or name.endswith("dist-info/LICENSE.txt"):
                place = target / Path(name).name
            else:
                continue
            if not name.endswith("/"):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(wheel.read(name))
    return target


class Tools:
    """Tools run by several threads, all of which one thread may stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped: HostError | None = None

    def stop(self, why: HostError) -> HostError:
        """Terminate the running tools, and start no more.  Return the reason given by the first caller."""
        with self._lock:
            self._stopped = self._stopped or why
            for process in self._running:
                process.terminate()  # g++ then ends its own compiler
            return self._stopped

    @contextmanager
    def running(self, argv: list[str]) -> Iterator[subprocess.Popen[str]]:
        """Start a process, which has ended when the context is left.  Raises HostError if it can't start."""
        pipe = subprocess.PIPE
        with self._lock:
            if self._stopped:
                raise self._stopped
            try:
                process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True)
            except OSError as e:
                hint = "The compiler's package, or binutils, has it."
                raise HostError(f"{argv[0]} can't be run: {e.strerror}", hint=hint) from None
            self._running.add(process)
        try:
            with process:
                try:
                    yield process
                except BaseException:
                    process.kill()
                    raise
        finally:
            with self._lock:
                self._running.discard(process)


def run_tool(argv: list[str], tools: Tools | None = None) -> str:
    """Run a tool, one of ``tools``, and return its output.  Raises HostError with the tool's complaint."""
    with (tools or Tools()).running(argv) as process:
        out, error = process.communicate(timeout=TOOL_LIMIT)
    missing = sorted(set(_UNDEFINED.findall(error)))
    if process.returncode != 0 and missing:
        raise CompilerError(
            f"nothing that is linked defines {', '.join(missing)}",
            hint="csrc/oneccl/shim.cpp defines what oneCCL's static library refers to and does not contain.",
        )
    if process.returncode != 0:
        lines = [line for line in error.splitlines() if "error" in line or "undefined" in line]
        shown = "\n  ".join((lines or error.splitlines())[:5])
        known = "It compiles with g++ 11 or newer, for torch 2.8 and 2.13"
        raise CompilerError(
            f"the compiler failed:\n  {shown}", hint=f"{known}; the command was: {' '.join(argv)}"
        )
    return out
