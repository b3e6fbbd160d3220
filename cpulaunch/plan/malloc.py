"""Tunes glibc's malloc to keep the memory that a program frees.

By default, glibc maps each large tensor and unmaps it when it is freed, so the kernel clears the same pages
in every step.  The variable ``GLIBC_TUNABLES`` changes that ("Memory Allocation Tunables" in glibc's manual).
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
    # torch aligns tensors to 64 bytes.  These two caches would keep the few bytes before a tensor, so they
    # couldn't be merged with the tensor's memory when it is freed.  The next tensor of the same size wouldn't
    # fit, and the heap would grow (sourceware.org/bugzilla/show_bug.cgi?id=14581).
    "glibc.malloc.mxfast": 0,
    "glibc.malloc.tcache_count": 0,
}
"""Tunables with which glibc's malloc keeps freed memory for the next step."""

OLDEST = (2, 26)
"""The first glibc that reads tunables."""

ENOUGH = 8 << 30
"""Minimum bytes of memory per rank for tuning, as the need of a rank is unknown."""

# Tunable → glibc's older variable with the same meaning.
_OWN_VARIABLES = {
    "glibc.malloc.mmap_max": "MALLOC_MMAP_MAX_",
    "glibc.malloc.trim_threshold": "MALLOC_TRIM_THRESHOLD_",
    "glibc.malloc.top_pad": "MALLOC_TOP_PAD_",
}


def demand_glibc(libc: str | None) -> None:
    """Raise PlanError if the host's C library is known and can't be tuned."""
    if libc is not None and (why := _why_not_tunable(libc)):
        raise PlanError(f"allocator {GLIBC}: {why}", hint="--allocator auto uses what a host has")


def why_untuned(libc: str | None, limit: int | None, ranks: int) -> str:
    """Return why malloc can't be tuned on a host with ``ranks`` ranks; empty if it can.

    ``libc`` and ``limit`` are ``libc`` and ``memory_limit`` of `HostFacts`.  Kept memory counts towards the
    limit.
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
    """Return GLIBC_TUNABLES with the tunables of KEEP; tunables in the user's variables ``users`` win."""
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
