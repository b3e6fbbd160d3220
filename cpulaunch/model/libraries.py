"""The shared libraries that ranks can be started with, by the names that they have here."""

from __future__ import annotations

FILES = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so"),
    "jemalloc": ("libjemalloc.so.2", "libjemalloc.so"),
    "intel": ("libiomp5.so",),
}
"""What a library is called here, and the names that its file may have, the preferred first."""


def can_be_preloaded(path: str) -> bool:
    """Whether LD_PRELOAD can name the file: there, spaces and colons end a path (ld.so(8))."""
    return not set(path) & {" ", ":"}


TORCHS_OWN = "torch"
"""What the OpenMP runtime that torch brings is called here."""
