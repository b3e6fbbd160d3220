"""What is installed and built, found in a few milliseconds and without importing torch.

The launcher asks this before it starts ranks, and a rank before it loads the group.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib import machinery
from pathlib import Path

ONECCL_VERSION = "2022.2.0"
OLDEST_TORCH = (2, 8)
PACKAGE = "cpulaunch_ccl"  # what `ccl build --wheel` makes
BINDINGS = "oneccl_bindings_for_pytorch"
SOURCES = Path(__file__).with_name("csrc")
_RECORD = "build.json"


@dataclass(frozen=True)
class Built:
    """A compiled group and what it was compiled for."""

    directory: Path
    torch: str
    python: str
    oneccl: str
    compiler: str
    abi: str
    sources: str
    origin: str  # "wheel" or "cache"

    @property
    def module(self) -> Path:
        """The shared library to load."""
        return self.directory / "_group.so"


@dataclass(frozen=True)
class State:
    """What this Python would use for the backend ``ccl``."""

    torch: str | None  # version of the installed torch
    torch_directory: Path | None
    candidates: tuple[Built, ...]  # all that is built, for whatever torch
    bindings: str | None  # version of oneccl_bindings_for_pytorch
    bindings_directory: Path | None = None

    @cached_property
    def built(self) -> Built | None:
        """The group that fits this torch, Python and cpulaunch."""
        wanted = (self.torch, python_tag(), ONECCL_VERSION, sources_digest())
        return next((b for b in self.candidates if (b.torch, b.python, b.oneccl, b.sources) == wanted), None)

    @property
    def bindings_fit(self) -> bool:
        """Whether Intel's bindings are of this torch's series."""
        return bool(self.torch and self.bindings and series(self.torch) == series(self.bindings))

    @property
    def problem(self) -> str | None:
        """Why our group cannot be used as things are, or None."""
        if self.torch is None:
            return "torch is not installed for this Python"
        if not is_supported(self.torch):
            return f"torch {self.torch} is older than 2.8, the first for which it can be built"
        if self.built is None:
            others = ", ".join(sorted({f"torch {built.torch}" for built in self.candidates}))
            return f"it is not built for torch {self.torch}" + (f" (only for {others})" if others else "")
        return None


def state() -> State:
    """What is there.  Imports no torch and takes a few milliseconds."""
    directory = torch_directory()
    version = _torch_version(directory) if directory else None
    spec = machinery.PathFinder.find_spec(BINDINGS)
    bindings = Path(spec.origin).parent if spec and spec.origin else None
    built = (*_from_wheel(), *_from_cache())
    return State(version, directory, built, _bindings_version() if bindings else None, bindings)


def bindings_advice(there: State) -> str:
    """What to say where Intel's bindings do not fit."""
    if there.bindings is None:
        return "oneccl_bind_pt is not installed for this Python"
    wanted = ".".join(map(str, series(there.torch or "0.0")))
    return (
        f"oneccl_bind_pt {there.bindings} is not for torch {there.torch}: it works with the torch that it "
        f"was built for only, here oneccl_bind_pt {wanted}.* (the last ones are 2.8.*)"
    )


def describe(there: State, binding: str = "auto") -> list[tuple[str, str]]:
    """What is there and what would be used, as (label, text): for ``ccl info`` and ``env``."""
    lines = [
        ("torch", there.torch or "not installed"),
        ("oneCCL", f"{ONECCL_VERSION}, linked into the group"),
    ]
    if binding == "oneccl_bind_pt":
        theirs = (
            f"oneccl_bind_pt {there.bindings}" if there.bindings_fit else f"nothing: {bindings_advice(there)}"
        )
        lines.append(("used for ccl", theirs))
    elif there.built:
        lines.append(("used for ccl", f"{there.built.module} ({there.built.origin})"))
    else:
        lines.append(("used for ccl", f"nothing: {there.problem}; run `cpulaunch ccl build`"))
    lines += [("built", f"for torch {b.torch}, {b.python}, oneCCL {b.oneccl}, by {b.compiler}: {b.directory}"
               + ("" if b.sources == sources_digest() else " (of another version of cpulaunch)"))
              for b in there.candidates]  # fmt: skip
    if there.bindings and binding != "oneccl_bind_pt":
        lines.append(
            ("not used", f"oneccl_bind_pt {there.bindings}, unless --ccl-binding oneccl_bind_pt asks for it")
        )
    elif not there.bindings:
        lines.append(("oneccl_bind_pt", "not installed"))
    return lines


def cache_directory() -> Path:
    """Where groups are built, one directory each."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cpulaunch" / "ccl"


def sources_digest() -> str:
    """Identifies the C++ sources: a group of other sources is another group."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".hpp"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def python_tag() -> str:
    """``"cp311"``: extension modules are made for one version of Python."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def is_supported(torch: str) -> bool:
    """Whether the sources may compile with this torch."""
    return series(torch) >= OLDEST_TORCH


def torch_directory() -> Path | None:
    """The directory of the package that ``import torch`` would import."""
    spec = machinery.PathFinder.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def write_record(directory: Path, built: Built) -> None:
    """Note beside a compiled group what it was compiled for."""
    fields = ("torch", "python", "oneccl", "compiler", "abi", "sources")
    (directory / _RECORD).write_text(json.dumps({name: getattr(built, name) for name in fields}, indent=1))


def _torch_version(directory: Path) -> str | None:
    try:
        found = re.search(r"^__version__ = '([^']+)'", (directory / "version.py").read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def series(version: str) -> tuple[int, ...]:
    """``(2, 13)`` for ``"2.13.0+cpu"``."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _from_wheel() -> list[Built]:
    spec = machinery.PathFinder.find_spec(PACKAGE)
    return _read(Path(spec.origin).parent, "wheel") if spec and spec.origin else []


def _from_cache() -> list[Built]:
    root = cache_directory()
    directories = sorted(root.glob("torch-*")) if root.is_dir() else []
    return [built for directory in directories for built in _read(directory, "cache")]


def _read(directory: Path, origin: str) -> list[Built]:
    try:
        return [Built(directory, **json.loads((directory / _RECORD).read_text()), origin=origin)]
    except (OSError, ValueError, TypeError):
        return []  # of another version of cpulaunch, or none of ours


def _bindings_version() -> str:
    from importlib import metadata  # takes 15 ms, for the few who have them

    for name in ("oneccl_bind_pt", "oneccl-bind-pt"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"
