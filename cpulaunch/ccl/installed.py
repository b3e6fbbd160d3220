"""Finds out what is installed and built, in a few milliseconds and without importing torch.

The group consists of two shared libraries: the core, for all versions of torch and Python, and a layer, for
one series of torch and one version of Python.  A third library, the module with oneCCL, is built on request.
The kernels of `cpulaunch.kernels` are a library for one series of torch and all versions of Python.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import machinery
from pathlib import Path

from cpulaunch.user_file import cache_home

ONECCL_VERSION = "2022.2.0"
OLDEST_TORCH = (2, 8)
PACKAGES = ("cpulaunch_ccl", "cpulaunch_ccl_core")
"""Packages in wheels: ``ccl build --wheel`` makes the first, ``scripts/build_wheels.sh`` both."""
BINDINGS = "oneccl_bindings_for_pytorch"
SOURCES = Path(__file__).with_name("csrc")
KERNELS = Path(__file__).parents[1] / "kernels" / "csrc"
FILES = {
    "core": "libcpulaunch_ccl.so",
    "layer": "_group.so",
    "oneccl": "libcpulaunch_oneccl.so",
    "kernels": "libcpulaunch_kernels.so",
}
"""Kind of part → name of its shared library."""
_COMMON = ("core/*.h", "core/*.hpp", "core/boundary.cpp")
SOURCES_OF = {
    "core": ("core/*",),
    "layer": (*_COMMON, "layer/*"),
    "oneccl": (*_COMMON, "oneccl/*"),
    "kernels": ("*",),
}
_RECORD = "build.json"
_SYMBOL_VERSION = re.compile(rb"\0((?:GLIBC|GLIBCXX|CXXABI)_[0-9.]+)(?=\0)")


@dataclass(frozen=True)
class Part:
    """A compiled library, and what it was compiled for."""

    kind: str  # a key of FILES
    directory: Path
    origin: str  # "wheel" or "cache"
    sources: str
    machine: str
    compiler: str
    glibc: str  # version on the compiling host; "" in a wheel whose tag has the required version
    torch: str = ""  # torch_key() of a layer and of kernels
    python: str = ""  # python_tag() of a layer
    abi: str = ""  # torch_abi() of a layer and of kernels

    @property
    def file(self) -> Path:
        """The path of the shared library."""
        return self.directory / FILES[self.kind]


@dataclass(frozen=True)
class Built:
    """A compiled group that this Python can load."""

    core: Part
    layer: Part
    oneccl: Part | None

    @property
    def torch(self) -> str:
        """The series of torch, or the version of a development build."""
        return self.layer.torch

    @property
    def module(self) -> Path:
        """The path of the shared library that Python imports."""
        return self.layer.file

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts of the group."""
        return (self.core, self.layer, *([self.oneccl] if self.oneccl else []))


@dataclass(frozen=True)
class State:
    """The installed torch, the built parts, and Intel's bindings."""

    torch: str | None  # version of the installed torch
    torch_directory: Path | None
    candidates: tuple[Part, ...]  # all built parts, for any torch
    bindings: str | None  # version of oneccl_bindings_for_pytorch
    bindings_directory: Path | None = None

    def part(self, kind: str) -> Part | None:
        """Return the part for this torch, Python, machine and cpulaunch, if it may be loaded here."""
        return next((each for each in self._fitting(kind) if obstacle(each) is None), None)

    @cached_property
    def built(self) -> Built | None:
        """The compiled group that this Python can load, or None."""
        core, layer = self.part("core"), self.part("layer")
        return Built(core, layer, self.part("oneccl")) if core and layer else None

    @property
    def bindings_fit(self) -> bool:
        """Whether Intel's bindings are of this torch's series."""
        return bool(self.torch and self.bindings and series(self.torch) == series(self.bindings))

    @property
    def problem(self) -> str | None:
        """Why cpulaunch's group can't be used, or None."""
        if self.torch is None:
            return "torch is not installed for this Python"
        if not is_supported(self.torch):
            return f"torch {self.torch} is older than 2.8, the oldest supported version"
        if self.built is None:
            return self._why_missing("core") or self._why_missing("layer")
        return None

    @property
    def group_obstacle(self) -> str | None:
        """Why a group that is built for this torch can't be loaded here, or None.  A rebuild helps."""
        return self.problem if self._fitting("core") and self._fitting("layer") else None

    @property
    def oneccl_problem(self) -> str | None:
        """Why oneCCL can't carry the group's collectives, or None."""
        return self.problem or (self._why_missing("oneccl") if self.part("oneccl") is None else None)

    @property
    def kernels_problem(self) -> str | None:
        """Why the kernels can't be used, or None."""
        if self.torch is None or not is_supported(self.torch):
            return self.problem
        return None if self.part("kernels") else self._why_missing("kernels")

    @cached_property
    def wanted(self) -> dict[str, dict[str, str]]:
        """Kind of part → fields of `Part` that a usable part must have."""
        machine = os.uname().machine
        wanted = {kind: {"sources": sources_digest(kind), "machine": machine} for kind in FILES}
        if self.torch and self.torch_directory:
            abi = torch_abi(self.torch_directory)
            of_torch = {"torch": torch_key(self.torch), "abi": abi}
            wanted["kernels"] |= of_torch
            wanted["layer"] |= {**of_torch, "python": python_tag()}
        return wanted

    def _fitting(self, kind: str) -> list[Part]:
        wanted = self.wanted[kind]
        return [
            each
            for each in self.candidates
            if each.kind == kind and all(getattr(each, name) == value for name, value in wanted.items())
        ]

    def _why_missing(self, kind: str) -> str | None:
        fitting = self._fitting(kind)
        obstacles = [obstacle(each) for each in fitting]
        if None in obstacles:
            return None
        if obstacles:
            return obstacles[0]
        if kind == "oneccl":
            return "its oneCCL module is not built (`cpulaunch ccl build --oneccl`)"
        for_torch = "kernels" if kind == "kernels" else "layer"
        others = sorted({f"torch {each.torch}" for each in self.candidates if each.kind == for_torch})
        return f"it is not built for torch {self.torch}" + (
            f" (only for {', '.join(others)})" if others else ""
        )


def state() -> State:
    """Find out what is installed, without importing torch."""
    directory = torch_directory()
    version = _torch_version(directory) if directory else None
    spec = machinery.PathFinder.find_spec(BINDINGS)
    bindings = Path(spec.origin).parent if spec and spec.origin else None
    candidates = (*_from_wheels(), *_from_cache())
    return State(version, directory, candidates, _bindings_version() if bindings else None, bindings)


def bindings_advice(there: State) -> str:
    """Return why Intel's bindings can't be used, and which version can."""
    if there.bindings is None:
        return "oneccl_bind_pt is not installed for this Python"
    wanted = ".".join(map(str, series(there.torch or "0.0")))
    return (
        f"oneccl_bind_pt {there.bindings} is not for torch {there.torch}: it works with the torch that it "
        f"was built for only; this torch needs oneccl_bind_pt {wanted}.* (the last ones are 2.8.*)"
    )


def describe(there: State, binding: str = "auto") -> list[tuple[str, str]]:
    """Describe what is installed and used, in rows (label, text), for ``ccl info`` and ``env``."""
    lines = [("torch", there.torch or "not installed")]
    if binding == "oneccl_bind_pt":
        theirs = (
            f"oneccl_bind_pt {there.bindings}" if there.bindings_fit else f"nothing: {bindings_advice(there)}"
        )
        lines.append(("used for ccl", theirs))
    elif there.built:
        lines.append(("used for ccl", f"{there.built.module} ({there.built.layer.origin})"))
        lines.append(("with the core", f"{there.built.core.file} ({there.built.core.origin})"))
    else:
        lines.append(("used for ccl", f"nothing: {there.problem}; run `cpulaunch ccl build`"))
    if binding != "oneccl_bind_pt":
        oneccl = there.part("oneccl")
        needed = (
            "not built; `cpulaunch ccl build --oneccl` builds it, and so do runs that need it: with "
            "--ccl-transport oneccl or mpi, several workers, or an algorithm of oneCCL"
        )
        lines.append(("oneCCL", f"{ONECCL_VERSION}, {oneccl.file}" if oneccl else needed))
    kernels = there.part("kernels")
    lines.append(("kernels", str(kernels.file) if kernels else f"none: {there.kernels_problem}"))
    for each in there.candidates:
        what = f"{each.kind} for torch {each.torch}" if each.torch else each.kind
        what += f", {each.python}" if each.python else ""
        why = obstacle(each)
        note = f" (not used: {why})" if why else ""
        if each.sources != there.wanted[each.kind]["sources"]:
            note = " (of another version of cpulaunch)"
        lines.append(("built", f"{what}, by {each.compiler}: {each.directory}{note}"))
    if there.bindings and binding != "oneccl_bind_pt":
        lines.append(("not used", f"oneccl_bind_pt {there.bindings}; --ccl-binding oneccl_bind_pt uses it"))
    elif not there.bindings:
        lines.append(("oneccl_bind_pt", "not installed"))
    return lines


# --- what fits


def cache_directory() -> Path:
    """Return the directory with a subdirectory for each built part."""
    return cache_home() / "cpulaunch" / "ccl"


def sources_of(kind: str) -> list[Path]:
    """Return a part's source files, including headers."""
    root = KERNELS if kind == "kernels" else SOURCES
    return sorted({path for pattern in SOURCES_OF[kind] for path in root.glob(pattern)})


def sources_digest(kind: str) -> str:
    """Return a digest of a part's C++ sources."""
    digest = hashlib.sha256(ONECCL_VERSION.encode() if kind == "oneccl" else b"")
    for path in sources_of(kind):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def python_tag() -> str:
    """Return the tag of this version of Python, such as ``cp311``."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def torch_key(version: str) -> str:
    """Return the part of torch's version that determines its ABI.

    It is the series, such as ``2.13``, or the whole version of a development build.
    """
    public, _, _ = version.partition("+")
    released = re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", public) and "git" not in version
    return ".".join(map(str, series(version))) if released else version


def torch_abi(directory: Path) -> str:
    """Return the value of _GLIBCXX_USE_CXX11_ABI with which torch was built: ``"0"`` or ``"1"``."""
    try:
        text = (directory / "share/cmake/Torch/TorchConfig.cmake").read_text()
    except OSError:
        return "1"
    return "0" if "_GLIBCXX_USE_CXX11_ABI=0" in text else "1"


def is_supported(torch: str) -> bool:
    """Return whether this version of torch is supported."""
    return series(torch) >= OLDEST_TORCH


def series(version: str) -> tuple[int, ...]:
    """Return ``(2, 13)`` for ``"2.13.0+cpu"``."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def glibc_version() -> str:
    """Return this host's glibc version, such as ``"glibc 2.36"``."""
    return os.confstr("CS_GNU_LIBC_VERSION") or ""


# --- what may be loaded


def obstacle(part: Part) -> str | None:
    """Return why a part that fits can't be loaded on this host, or None."""
    if part.origin == "cache" and (open_to := writable_by_others(part.file)):
        return f"others may write to {open_to}"
    if part.glibc not in ("", glibc_version()) and (lacking := missing_versions(part.file)):
        return f"{part.file} was built on another host: this one lacks {', '.join(lacking)}"
    return None


def writable_by_others(path: Path) -> Path | None:
    """Return ``path`` or a cache directory above it that another user owns or may write to, or None."""
    end = cache_directory().parent.parent
    for each in (path, *path.parents):
        if each == end:
            break
        try:
            own, target = each.lstat(), each.stat()  # a link has an owner of its own, but no mode
        except OSError:
            return each
        if not {own.st_uid, target.st_uid} <= {0, os.geteuid()} or target.st_mode & 0o022:
            return each
    return None


def missing_versions(file: Path) -> list[str]:
    """Return the symbol versions that a library needs and this host's libc or libstdc++ lacks."""
    needed = sorted({match[1].decode() for match in _SYMBOL_VERSION.finditer(file.read_bytes())})
    return [version for version in needed if not _has_version(version)]


def _has_version(version: str) -> bool:
    name, _, number = version.partition("_")
    if name == "GLIBC":
        return _numbers(number) <= _numbers(glibc_version())
    path = _libstdcxx()
    if path is None:
        return True  # torch itself won't load
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(f"\0{version}\0".encode()) >= 0


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _libstdcxx() -> str | None:
    """Return the path of the C++ library that this Python loads."""
    import ctypes

    try:
        ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    found = re.search(r"/\S*/libstdc\+\+\.so\S*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return found[0] if found else None


# --- records


def torch_directory() -> Path | None:
    """Return the directory of the installed torch."""
    spec = machinery.PathFinder.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def write_record(part: Part) -> None:
    """Write a part's fields to a file beside it."""
    fields = ("kind", "sources", "machine", "compiler", "glibc", "torch", "python", "abi")
    text = json.dumps({name: getattr(part, name) for name in fields}, indent=1)
    (part.directory / _RECORD).write_text(text)


def read_record(directory: Path, origin: str) -> Part | None:
    """Return the part in a directory; None if there is none of this version of cpulaunch."""
    try:
        part = Part(**json.loads((directory / _RECORD).read_text()), directory=directory, origin=origin)
        return part if part.kind in FILES else None
    except (OSError, ValueError, TypeError):
        return None


def _torch_version(directory: Path) -> str | None:
    try:
        found = re.search(r"^__version__ = '([^']+)'", (directory / "version.py").read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def _from_wheels() -> list[Part]:
    specs = [machinery.PathFinder.find_spec(package) for package in PACKAGES]
    packages = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    return _read((directory for package in packages for directory in sorted(package.iterdir())), "wheel")


def _from_cache() -> list[Part]:
    try:
        return _read(sorted(cache_directory().iterdir()), "cache")
    except OSError:
        return []


def _read(directories: Iterable[Path], origin: str) -> list[Part]:
    read = (read_record(directory, origin) for directory in directories)
    return [part for part in read if part]


def _bindings_version() -> str:
    from importlib import metadata  # takes 15 ms, and few users have the bindings

    for name in ("oneccl_bind_pt", "oneccl-bind-pt"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"
