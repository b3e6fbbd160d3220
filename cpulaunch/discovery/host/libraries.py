"""Find the memory allocators and OpenMP runtimes of a host that a rank's program can preload.

They are searched in Python's environment (venv or conda), then in LD_LIBRARY_PATH, then in the directories of
the dynamic linker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from glob import glob

from cpulaunch.discovery.host.files import read_file
from cpulaunch.model.libraries import FILES, TORCHS_OWN, can_be_preloaded

_RUNTIMES = ("libgomp", "libiomp5", "libomp")
_SYSTEM = ("/usr/local/lib64", "/usr/local/lib", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


def find_libraries(directories: Iterable[str], packages: Iterable[str]) -> dict[str, str]:
    """Find the path of each library of FILES, and of the OpenMP runtime that torch uses.

    ``directories`` are searched before the system's directories.  ``packages`` are directories with Python
    packages.  Files for another architecture are skipped.  Files that can't be preloaded are the last choice.
    """
    directories = list(dict.fromkeys((*directories, *_linker_directories(), *_SYSTEM)))
    own_kind = _kind(sys.executable)
    found = {}
    for library, names in FILES.items():
        paths = [os.path.join(directory, name) for directory in directories for name in names]
        for path in sorted(paths, key=can_be_preloaded, reverse=True):
            if os.path.exists(path) and _kind(path) == own_kind:
                found[library] = path
                break
    if runtime := _torch_runtime(directories, packages):
        found[TORCHS_OWN] = runtime
    return found


def library_directories() -> tuple[str, ...]:
    """The library directories of this process's environment: Python's, conda's and ``LD_LIBRARY_PATH``.

    With ``-S``, ``sys.prefix`` isn't the venv's, so the interpreter's path is also used.
    """
    prefixes = [os.path.dirname(os.path.dirname(sys.executable)), sys.prefix, os.environ.get("CONDA_PREFIX")]
    named = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    inside = [os.path.join(prefix, "lib") for prefix in prefixes if prefix]
    return tuple(dict.fromkeys(path for path in (*inside, *named) if os.path.isabs(path)))


def import_directories() -> tuple[str, ...]:
    """The directories from which this Python imports packages."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    own = os.path.join(os.path.dirname(os.path.dirname(sys.executable)), "lib", version, "site-packages")
    known = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return tuple(dict.fromkeys((*known, own)))


def _torch_runtime(directories: Iterable[str], packages: Iterable[str]) -> str | None:
    """The OpenMP runtime of torch: from its wheel, or for conda the target of ``libgomp.so.1``."""
    for package in packages:
        folder = os.path.join(package, "torch", "lib")
        if os.path.isdir(folder):
            bundled = (name for name in sorted(os.listdir(folder)) if name.startswith(_RUNTIMES))
            if name := next(bundled, None):
                return os.path.join(folder, name)
            linked = (os.path.join(directory, "libgomp.so.1") for directory in directories)
            return next((os.path.realpath(path) for path in linked if os.path.exists(path)), None)
    return None


def _linker_directories(file: str = "/etc/ld.so.conf") -> Iterator[str]:
    """The directories in the dynamic linker's configuration."""
    for line in (read_file(file) or "").splitlines():
        word, _, rest = line.partition("#")[0].strip().partition(" ")
        if word == "include":
            for included in sorted(glob(rest.strip())):
                yield from _linker_directories(included)
        elif word.startswith("/"):
            yield word


def _kind(file: str) -> bytes | None:
    """Word size, byte order and architecture from the header of an ELF file; None for another file."""
    try:
        with open(file, "rb") as f:
            header = f.read(20)
    except OSError:
        return None
    return header[4:6] + header[18:20] if header.startswith(b"\x7fELF") and len(header) == 20 else None
