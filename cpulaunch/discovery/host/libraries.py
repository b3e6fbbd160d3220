"""Find the memory allocators and OpenMP runtimes of a host that a rank's program can preload.

The search is for file names of the projects' own builds and of distributions: first in Python's environment
(venv or conda), then in LD_LIBRARY_PATH, then in the directories of the dynamic linker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from glob import glob

from cpulaunch.discovery.host.files import read_file
from cpulaunch.model.libraries import FILES, TORCHS_OWN, can_be_preloaded

_OF_TORCH = ("libgomp", "libiomp5", "libomp")
_USUAL = ("/usr/local/lib64", "/usr/local/lib", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


def find_libraries(directories: Iterable[str], packages: Iterable[str]) -> dict[str, str]:
    """Find the path of each library of FILES, and of the OpenMP runtime that torch uses.

    ``directories`` are searched before the system's directories.  ``packages`` are the directories that
    Python imports from.  Files for another kind of processor are skipped, as the dynamic linker does.  A file
    that can't be preloaded is taken only if there is no other.
    """
    places = list(dict.fromkeys((*directories, *_directories_of_linker(), *_USUAL)))
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
    """The library directories of this process's environment: Python's own, conda's, ``LD_LIBRARY_PATH``.

    Python's own directory is also derived from the interpreter's path, as with ``-S``, ``sys.prefix`` isn't
    the venv's.
    """
    prefixes = [os.path.dirname(os.path.dirname(sys.executable)), sys.prefix, os.environ.get("CONDA_PREFIX")]
    named = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    inside = [os.path.join(prefix, "lib") for prefix in prefixes if prefix]
    return tuple(dict.fromkeys(path for path in (*inside, *named) if os.path.isabs(path)))


def import_directories() -> tuple[str, ...]:
    """The directories that this Python imports packages from, to be searched on other hosts as well."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    own = os.path.join(os.path.dirname(os.path.dirname(sys.executable)), "lib", version, "site-packages")
    known = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return tuple(dict.fromkeys((*known, own)))


def _runtime_of_torch(places: Iterable[str], packages: Iterable[str]) -> str | None:
    """The OpenMP runtime of torch: the one in its wheel, or for conda the environment's ``libgomp.so.1``.

    Conda's ``libgomp.so.1`` may be a link to any runtime, so it is resolved.
    """
    for package in packages:
        folder = os.path.join(package, "torch", "lib")
        if os.path.isdir(folder):
            carried = (name for name in sorted(os.listdir(folder)) if name.startswith(_OF_TORCH))
            if name := next(carried, None):
                return os.path.join(folder, name)
            linked = (os.path.join(place, "libgomp.so.1") for place in places)
            return next((os.path.realpath(path) for path in linked if os.path.exists(path)), None)
    return None


def _directories_of_linker(file: str = "/etc/ld.so.conf") -> Iterator[str]:
    """The directories that the dynamic linker's configuration names."""
    for line in (read_file(file) or "").splitlines():
        word, _, rest = line.partition("#")[0].strip().partition(" ")
        if word == "include":
            for included in sorted(glob(rest.strip())):
                yield from _directories_of_linker(included)
        elif word.startswith("/"):
            yield word


def _kind(file: str) -> bytes | None:
    """The word size, byte order and architecture in an ELF file's header; None if it is no ELF file."""
    try:
        with open(file, "rb") as f:
            header = f.read(20)
    except OSError:
        return None
    return header[4:6] + header[18:20] if header.startswith(b"\x7fELF") and len(header) == 20 else None
