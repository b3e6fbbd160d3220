"""Tunes glibc's malloc to keep the memory that a program frees.

By default, glibc takes each large tensor from the kernel and returns it when it is freed, so the kernel has
to clear the same pages again in every step.  ``GLIBC_TUNABLES`` changes that ("Memory Allocation Tunables" in
the manual of glibc).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cpulaunch.errors import PlanError

GLIBC = "glibc"
"""Name of glibc's tuned malloc in the settings."""

TUNABLES = "GLIBC_TUNABLES"

KEEP = {
    # Never mmap.  A large threshold would have the same effect, but before 2.35 glibc accepts at most 32 MiB.
    "glibc.malloc.mmap_max": 0,
    "glibc.malloc.trim_threshold": 16 << 30,
    "glibc.malloc.top_pad": 64 << 20,
    # torch aligns its tensors to 64 bytes.  The few bytes cut off for that would go to these two caches,
    # which keep them from being merged with the tensor when it is freed: the next tensor of the same size
    # wouldn't fit there, and the heap would grow (sourceware.org/bugzilla/show_bug.cgi?id=14581).
    "glibc.malloc.mxfast": 0,
    "glibc.malloc.tcache_count": 0,
}
"""Tunables with which glibc's malloc keeps freed memory for the next step."""

OLDEST = (2, 26)
"""The first glibc that reads tunables."""

ENOUGH = 8 << 30
"""Bytes of memory per rank that suffice for a rank of unknown size."""

# glibc's older variables for the same.
_OWN_VARIABLES = {
    "glibc.malloc.mmap_max": "MALLOC_MMAP_MAX_",
    "glibc.malloc.trim_threshold": "MALLOC_TRIM_THRESHOLD_",
    "glibc.malloc.top_pad": "MALLOC_TOP_PAD_",
}


def demand_glibc(libc: str | None) -> None:
    """Raise PlanError if the host's C library is known and can't be tuned."""
    if libc is not None and (why := _why_not_tunable(libc)):
        raise PlanError(f"allocator {GLIBC}: {why}", hint="--allocator auto takes what a host has")


def why_untuned(libc: str | None, limit: int | None, ranks: int) -> str:
    """Return why the malloc of a host with ``ranks`` ranks isn't tuned; empty if it is to be tuned.

    ``libc`` and ``limit`` are the ``libc`` and the ``memory_limit`` of `HostFacts`.  Freed memory that is
    kept counts towards the limit, and the program's need is unknown.
    """
    if libc is None:
        return "the C library is unknown"
    if why := _why_not_tunable(libc):
        return why
    if limit is not None and limit < ranks * ENOUGH:
        each = f"{limit / ranks / 2**30:.1f} GiB of memory per rank"
        return f"the control group allows {each}, and {ENOUGH >> 30} GiB are needed to keep freed memory"
    return ""


def tunables(users: Mapping[str, str]) -> str:
    """Return GLIBC_TUNABLES: the user's tunables, from the variables ``users``, and the others of KEEP."""
    own = users.get(TUNABLES, "")
    taken = {each.partition("=")[0] for each in own.split(":")}
    taken |= {name for name, variable in _OWN_VARIABLES.items() if variable in users}
    ours = [f"{name}={value}" for name, value in KEEP.items() if name not in taken]
    return ":".join([*filter(None, [own]), *ours])


def _why_not_tunable(libc: str) -> str:
    if not (version := re.fullmatch(r"glibc (\d+)\.(\d+).*", libc)):
        return f"the C library is {libc}"
    oldest = ".".join(map(str, OLDEST))
    return "" if tuple(map(int, version.groups())) >= OLDEST else f"{libc} is older than {oldest}"
