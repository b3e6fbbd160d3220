"""Shared libraries that LD_PRELOAD can load into ranks, by cpulaunch's names for them."""

from __future__ import annotations

FILES = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so"),
    "jemalloc": ("libjemalloc.so.2", "libjemalloc.so"),
    "intel": ("libiomp5.so",),
}
"""cpulaunch's name of a library → its file names, the preferred one first."""


def can_be_preloaded(path: str) -> bool:
    """Return whether LD_PRELOAD can name the file.  A space or colon ends a path there (ld.so(8))."""
    return not set(path) & {" ", ":"}


TORCHS_OWN = "torch"
"""The name of the OpenMP runtime that comes with torch."""
