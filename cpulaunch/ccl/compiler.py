"""Compiles and links the core, torch's layer, the oneCCL module and the kernels."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from cpulaunch.ccl import installed
from cpulaunch.ccl.fetch import ELSEWHERE, Progress
from cpulaunch.ccl.installed import SOURCES, Part
from cpulaunch.ccl.tools import Tools, run_tool
from cpulaunch.errors import HostError

_JOB_MEMORY = 1536 << 20  # bytes: the layer's unit includes torch's headers
_CORE_LINK = (
    f"-Wl,-soname,{installed.FILES['core']}",
    f"-Wl,--version-script={SOURCES / 'core/exports.map'}",
)
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
"""Value of ATEN_CPU_CAPABILITY → the compiler's flags for its instructions, as in torch."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and its own identification, such as ``g++-12.2.0``."""

    path: str
    identity: str


@dataclass(frozen=True)
class Unit:
    """Sources that are compiled together.  They share headers, which take most of the time to compile."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]


def find_compiler() -> Compiler:
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


def check_headers() -> None:
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        raise HostError(f"Python's headers are not installed: no Python.h in {include}",
                        hint=f"Install python3-dev or python3-devel. {ELSEWHERE}")  # fmt: skip


# --- compiling


def units_of(kind: str, there: installed.State, oneccl: Path) -> list[Unit]:
    """Return a part's units.  Only code that computes or copies is fully optimized."""
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
    """Return the unit with the operations, and a unit with their loops for each kind of vector unit."""
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
    """Return the core's units."""
    flags = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", f"-I{SOURCES / 'core'}")
    arithmetic = SOURCES / "core/arithmetic.cpp"
    others = tuple(path for path in sorted((SOURCES / "core").glob("*.cpp")) if path != arithmetic)
    return [Unit("core", others, ("-O2", *flags)), Unit("arithmetic", (arithmetic,), ("-O3", *flags))]


def _pybind_names(torch: str) -> list[str]:
    """Return flags with torch's names for pybind11, which extensions must share until torch 2.8."""
    if installed.series(torch) > (2, 8):
        return []
    question = (
        "import json, torch._C as c; print(json.dumps([getattr(c, '_PYBIND11_' + n, None)"
        " for n in ('COMPILER_TYPE', 'STDLIB', 'BUILD_ABI')]))"
    )
    # Without our entry point, which would load the group that is to be built.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    asked = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, env=environment, timeout=300
    )
    if asked.returncode != 0:
        raise HostError(f"torch cannot be imported: {asked.stderr.strip().splitlines()[-1:]}")
    values = json.loads(asked.stdout.splitlines()[-1])
    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    return [
        f'-DPYBIND11_{name}="{value}"' for name, value in zip(names, values, strict=True) if value is not None
    ]


def jobs() -> int:
    """Return how many compilers to run at once, given this host's cores and memory."""
    cores = len(os.sched_getaffinity(0))
    try:
        available = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        available = None
    memory = int(available[1]) * 1024 // _JOB_MEMORY if available else cores
    return max(1, min(cores, memory))


def compile_units(
    units: dict[str, list[Unit]], compiler: Compiler, kept: Path, work: Path, progress: Progress
) -> dict[str, list[Path]]:
    """Compile to objects in the directory ``kept``, and return them by part.  Existing objects are reused."""
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
        except HostError as e:
            raise compilers.stop(e) from None  # the first failure, which stopped the other compilers

    progress(step, "")
    with ThreadPoolExecutor(jobs()) as pool:
        try:
            running = {pool.submit(compile_unit, unit, to) for unit, to in missing}
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
    """Return a file name for a unit's object, with a digest of its compiler, sources and flags."""
    # Directories of headers don't count, as oneCCL's are temporary.
    flags = [flag for flag in unit.flags if not flag.startswith("-I")]
    text = json.dumps([compiler.path, compiler.identity, installed.sources_digest(kind), flags])
    return f"{unit.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.o"


def build_core_elsewhere(command: Sequence[str], machine: str, directory: Path) -> Part:
    """Build the core for a wheel in ``directory``, with a cross compiler such as zig's."""
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


def link(
    part: Part,
    compiler: Compiler,
    objects: Sequence[Path],
    core: Part | None,
    there: installed.State,
    oneccl: Path,
) -> None:
    # Without `-z defs`, a missing symbol would be reported by a rank, not by the linker.
    argv = [compiler.path, "-shared", "-o", str(part.file), *map(str, objects), "-Wl,-z,defs",
            "-Wl,-Bsymbolic", "-Wl,--strip-debug", "-pthread"]  # fmt: skip
    if part.kind == "core":
        run_tool([*argv, *_CORE_LINK])
        return
    assert there.torch_directory is not None
    torch = [f"-L{there.torch_directory / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    if part.kind == "kernels":
        # Use the OpenMP library that torch has loaded: another one would start threads of its own.
        openmp = _ignored(compiler, objects, ("GOMP_", "omp_"))
        run_tool([*argv, *openmp, *torch])
        return
    assert core is not None
    argv.append(str(core.file))  # by soname: at run time, the core that was loaded first is used
    if part.kind == "oneccl":
        link_oneccl(argv, oneccl / "libccl.a")
        return
    # The process that loads the module has Python's symbols.
    run_tool([*argv, *_ignored(compiler, objects, ("Py", "_Py")), *torch, "-ltorch_python"])


def link_oneccl(argv: list[str], archive: Path) -> None:
    """Link with oneCCL's static library.  Raises HostError with the undefined symbols."""
    # oneCCL's symbols are hidden, as another copy of oneCCL may be loaded, such as in Intel's bindings.
    run_tool([*argv, str(archive), "-Wl,--exclude-libs,ALL", "-lrt", "-ldl", "-lpthread"])


def _ignored(compiler: Compiler, objects: Sequence[Path], prefixes: tuple[str, ...]) -> list[str]:
    """Return options that leave undefined symbols with these prefixes to the loading process."""
    nm = run_tool([compiler.path, "-print-prog-name=nm"]).strip()  # nm of a cross toolchain has a prefix
    listed = run_tool([nm, "--undefined-only", "--format=posix", *map(str, objects)])
    names = {line.split()[0] for line in listed.splitlines() if line}
    return [f"-Wl,--ignore-unresolved-symbol={name}" for name in sorted(names) if name.startswith(prefixes)]
