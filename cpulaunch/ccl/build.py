"""Compiles the group for the installed torch.  Only the command line calls this, never a rank."""

from __future__ import annotations

import fcntl
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cpulaunch.ccl import installed
from cpulaunch.ccl.fetch import ELSEWHERE, Progress, fetch_wheel
from cpulaunch.ccl.installed import ONECCL_VERSION, SOURCES, Built
from cpulaunch.errors import HostError

_UNDEFINED = re.compile(r"undefined reference to [`']([^']+)'")  # GNU ld and gold
_JOBS = 2  # a translation unit of torch's headers takes about 1 GiB and 10 s


@dataclass(frozen=True)
class _Torch:
    """How to compile against the installed torch."""

    version: str
    directory: Path
    abi: str
    flags: tuple[str, ...]


def build(
    progress: Progress = lambda step, detail: None, *, force: bool = False, patient: bool = True
) -> Built:
    """The group for the installed torch, from where it is built or else by building it.

    ``progress`` is told, in a few words, what is being done.  Builds of several processes wait for each
    other, and a group appears in the cache whole or not at all.  Takes a few minutes.  Without ``patient``,
    it fails soon where the network is needed and does not answer, or did not within the last hour.

    Raises HostError where something is missing: torch, a compiler, Python's headers, the network.
    """
    there = installed.state()
    if there.built and not force:
        return there.built
    compiler, identity = check(there)
    with _lock(progress):
        if not force and (built := installed.state().built):
            return built  # another process has just built it
        return _build(compiler, identity, progress, patient=patient)


def check(there: installed.State) -> tuple[str, str]:
    """The C++ compiler to build with, and what it calls itself.  Raises HostError where it can't be built."""
    if there.torch is None or not installed.is_supported(there.torch):
        raise HostError(
            f"the oneCCL process group cannot be built: {there.problem}", hint="Take `--backend gloo`."
        )
    if os.uname().machine != "x86_64":
        raise HostError(
            f"oneCCL exists for x86_64 only, this is {os.uname().machine}", hint="Take `--backend gloo`."
        )
    found = _compiler()
    _check_headers()
    return found


def _build(compiler: str, identity: str, progress: Progress, *, patient: bool) -> Built:
    root = installed.cache_directory()
    for left in root.glob("building-*"):  # by a build that was killed: this one has the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=root) as temporary:
        work = Path(temporary)
        oneccl = _oneccl(work, progress, patient=patient)
        torch = _ask_torch()  # takes seconds, so after what fails more often
        torch_part = f"torch-{torch.version}-{installed.python_tag()}-abi{torch.abi}"
        sources = installed.sources_digest()
        name = f"{torch_part}-oneccl-{ONECCL_VERSION}-{identity}-{sources}"
        result = work / "result"
        result.mkdir()
        _compile(torch, compiler, oneccl, work, result / "_group.so", progress)
        if installed.sources_digest() != sources:
            raise HostError(
                "cpulaunch's C++ sources were changed while they were compiled", hint="Build the group again."
            )
        shutil.copy(oneccl / "LICENSE.txt", result / "LICENSE-oneCCL.txt")
        built = Built(
            root / name, torch.version, installed.python_tag(), ONECCL_VERSION, identity, torch.abi, sources,
            "cache",
        )  # fmt: skip
        installed.write_record(result, built)
        if built.directory.exists():
            built.directory.rename(work / "replaced")
        result.rename(built.directory)
    return built


@contextmanager
def _lock(progress: Progress) -> Iterator[None]:
    root = installed.cache_directory()
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another build", "")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compiler() -> tuple[str, str]:
    """The C++ compiler and what it calls itself, such as ``g++-12.2.0``."""
    wanted = os.environ.get("CXX", "g++")
    path = shutil.which(wanted)
    if path is None:
        raise HostError(
            f"no C++ compiler: there is no {wanted!r} on PATH", hint=f"Install g++ 11 or newer. {ELSEWHERE}"
        )
    version = subprocess.run(
        [path, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, timeout=60
    )
    return path, f"{Path(path).name}-{version.stdout.split()[0] if version.stdout else 'unknown'}"


def _check_headers() -> None:
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        raise HostError(f"Python's headers are not installed: no Python.h in {include}",
                        hint=f"Install python3-dev or python3-devel. {ELSEWHERE}")  # fmt: skip


def _ask_torch() -> _Torch:
    """Asked in a process of its own: this one does not import torch."""
    question = (
        "import json, torch, torch._C as c; print(json.dumps([torch.__version__, torch.__path__[0],"
        " bool(c._GLIBCXX_USE_CXX11_ABI), [getattr(c, '_PYBIND11_' + n, None)"
        " for n in ('COMPILER_TYPE', 'STDLIB', 'BUILD_ABI')]]))"
    )
    # Without our own hook: what it would load may be what is to be built.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    asked = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, env=environment, timeout=300
    )
    if asked.returncode != 0:
        raise HostError(f"torch cannot be imported: {asked.stderr.strip().splitlines()[-1:]}")
    version, directory, abi, pybind = json.loads(asked.stdout.splitlines()[-1])
    # Up to 2.8, classes of two extensions meet only if pybind11 was told the same names in both.
    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    flags = [
        f'-DPYBIND11_{name}="{value}"' for name, value in zip(names, pybind, strict=True) if value is not None
    ]
    return _Torch(version, Path(directory), str(int(abi)), tuple(flags))


def _oneccl(work: Path, progress: Progress, *, patient: bool = True) -> Path:
    """A directory with oneCCL's ``include``, ``libccl.a`` and ``LICENSE.txt``, from its pinned wheel."""
    path = fetch_wheel(work, progress, patient=patient)
    target = work / "oneccl"
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


def _compile(
    torch: _Torch, compiler: str, oneccl: Path, work: Path, module: Path, progress: Progress
) -> None:
    include = torch.directory / "include"
    standard = "c++20" if installed.series(torch.version) >= (2, 10) else "c++17"
    flags = [
        "-O3", "-fPIC", f"-std={standard}", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={torch.abi}",
        *torch.flags, f"-I{oneccl / 'include'}", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
        f"-I{sysconfig.get_path('include')}",
    ]  # fmt: skip
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = {source: work / f"{source.stem}.o" for source in sources}
    step = f"compiling for torch {torch.version}"
    stop = threading.Event()

    def compile_file(source: Path) -> None:
        if stop.is_set():
            return
        try:
            _run([compiler, *flags, "-c", str(source), "-o", str(objects[source])])
        except HostError:  # Ctrl-C ends the compilers, too, and this thread goes on sooner than the main one
            stop.set()
            raise

    with ThreadPoolExecutor(min(_JOBS, os.cpu_count() or 1)) as pool:
        running = [pool.submit(compile_file, source) for source in sources]
        try:
            progress(step, "")
            for done, future in enumerate(as_completed(running), 1):
                future.result()
                progress(step, f"{done} of {len(sources)} files")
        except BaseException:
            stop.set()
            raise
    progress(step, "linking")
    _link(compiler, list(objects.values()), oneccl / "libccl.a", module, torch.directory / "lib")


def _link(compiler: str, objects: list[Path], archive: Path, module: Path, torch_libraries: Path) -> None:
    """Link the module.  Raises HostError that names the symbols that nothing defines."""
    # oneCCL's symbols stay inside: another copy of it, such as that of Intel's bindings, may be loaded too.
    # Without `-z defs` a shared library may lack symbols, which shows only in a rank.  Python's own symbols
    # come from the process that loads the module.
    pythons = _undefined_python_symbols(compiler, objects)
    python = [f"-Wl,--ignore-unresolved-symbol={name}" for name in pythons]
    _run([
        compiler, "-shared", "-o", str(module), *map(str, objects), str(archive), "-Wl,-z,defs", *python,
        "-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic", "-Wl,--strip-debug", f"-L{torch_libraries}",
        "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-lrt", "-ldl", "-lpthread",
    ])  # fmt: skip


def _undefined_python_symbols(compiler: str, objects: list[Path]) -> list[str]:
    nm = _run([compiler, "-print-prog-name=nm"]).strip()  # a toolchain's own may have a prefix in its name
    listed = _run([nm, "--undefined-only", "--format=posix", *map(str, objects)])
    names = {line.split()[0] for line in listed.splitlines() if line}
    return sorted(name for name in names if name.startswith(("Py", "_Py")))


def _run(argv: list[str]) -> str:
    """What a tool prints.  Raises HostError that says what it complains of."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    except OSError as e:
        hint = "The compiler's package, or binutils, has it."
        raise HostError(f"{argv[0]} can't be run: {e.strerror}", hint=hint) from None
    missing = sorted(set(_UNDEFINED.findall(done.stderr)))
    if done.returncode != 0 and missing:
        raise HostError(
            f"nothing that is linked defines {', '.join(missing)}",
            hint="csrc/oneccl_shim.cpp defines what oneCCL's static library refers to and does not contain.",
        )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line]
        shown = "\n  ".join((lines or done.stderr.splitlines())[:5])
        known = "It compiles with g++ 11 or newer, for torch 2.8 and 2.13"
        raise HostError(
            f"the compiler failed:\n  {shown}", hint=f"{known}; the command was: {' '.join(argv)}"
        )
    return done.stdout
