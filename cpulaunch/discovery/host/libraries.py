"""The memory allocators and OpenMP runtimes of a host: those that a rank's program can be started with.

Looked for are files with the names that the projects' own builds and the distributions give them, first in
the Python's environment (venv or conda), then where the user's programs look, then where the system's do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator

from cpulaunch.model.libraries import FILES, TORCHS_OWN, can_be_preloaded

_OF_TORCH = ("libgomp", "libiomp5", "libomp")
_USUAL = ("/usr/local/lib64", "/usr/local/lib", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


def find_libraries(directories: Iterable[str], packages: Iterable[str]) -> dict[str, str]:
    """The path of each library of FILES that is there, and of the OpenMP runtime that torch brings.

    ``directories`` are looked at before the system's, ``packages`` are where Python imports from.
    A file for another kind of processor is passed over, as the dynamic linker does.  One that can't be
    preloaded is taken only where there is no other.
    """
    places = list(dict.fromkeys((*directories, *_system_directories())))
    own_kind = _kind(sys.executable)
    found = {}
    for library, names in FILES.items():
        paths = [os.path.join(place, name) for place in places for name in names]
        for path in sorted(paths, key=can_be_preloaded, reverse=True):
            if os.path.exists(path) and _kind(path) == own_kind:
                found[library] = path
                break
    if runtime := _runtime_of_torch(places, packages):
        found[TORCHS_OWN] = runtime
    return found


def library_directories() -> tuple[str, ...]:
    """Where this process's environment has libraries: its Python's own, conda's, ``LD_LIBRARY_PATH``.

    Without ``site``, ``sys.prefix`` isn't the venv's: so where the program is decides.
    """
    prefixes = [os.path.dirname(os.path.dirname(sys.executable)), sys.prefix, os.environ.get("CONDA_PREFIX")]
    named = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    inside = [os.path.join(prefix, "lib") for prefix in prefixes if prefix]
    return tuple(dict.fromkeys(path for path in (*inside, *named) if os.path.isabs(path)))


def import_directories() -> tuple[str, ...]:
    """Where this Python imports packages from, for a look at the same places elsewhere."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    own = os.path.join(os.path.dirname(os.path.dirname(sys.executable)), "lib", version, "site-packages")
    known = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return tuple(dict.fromkeys((*known, own)))


def _runtime_of_torch(places: Iterable[str], packages: Iterable[str]) -> str | None:
    """Wheels carry a runtime; conda's torch takes its environment's ``libgomp.so.1``, which may be any."""
    for package in packages:
        folder = os.path.join(package, "torch", "lib")
        if os.path.isdir(folder):
            carried = (name for name in sorted(os.listdir(folder)) if name.startswith(_OF_TORCH))
            if name := next(carried, None):
                return os.path.join(folder, name)
            linked = (os.path.join(place, "libgomp.so.1") for place in places)
            return next((os.path.realpath(path) for path in linked if os.path.exists(path)), None)
    return None


def _system_directories() -> Iterator[str]:
    """Where the dynamic linker looks: /etc/ld.so.conf, then its usual places."""
    yield from _of_linker("/etc/ld.so.conf")
    yield from _USUAL


def _of_linker(file: str) -> Iterator[str]:
    for line in _lines(file):
        word, _, rest = line.partition("#")[0].strip().partition(" ")
        if word == "include":
            folder, _, pattern = rest.strip().rpartition("/")
            ending = pattern.lstrip("*")
            try:
                names = sorted(os.listdir(folder))
            except OSError:
                continue
            for name in names:
                if name.endswith(ending):
                    yield from (
                        path for path in map(str.strip, _lines(f"{folder}/{name}")) if path[:1] == "/"
                    )
        elif word.startswith("/"):
            yield word


def _lines(file: str) -> list[str]:
    try:
        with open(file, encoding="utf-8", errors="replace") as f:
            return f.read().splitlines()
    except OSError:
        return []


def _kind(file: str) -> bytes | None:
    """What an ELF file's header says of the processor: word size, byte order, architecture."""
    try:
        with open(file, "rb") as f:
            header = f.read(20)
    except OSError:
        return None
    return header[4:6] + header[18:20] if header.startswith(b"\x7fELF") and len(header) == 20 else None
