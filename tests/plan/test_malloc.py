"""The conditions for tuning glibc's malloc, and the value of GLIBC_TUNABLES."""

from __future__ import annotations

import pytest

from cpulaunch.errors import PlanError
from cpulaunch.plan.malloc import KEEP, demand_glibc, tunables, why_untuned

GIB = 1 << 30


@pytest.mark.parametrize(
    ("libc", "limit", "ranks", "why"),
    [
        ("glibc 2.36", None, 8, ""),
        ("glibc 2.28", None, 1, ""),
        ("glibc 2.26", None, 1, ""),
        ("glibc 2.42.9000", None, 1, ""),
        ("glibc 3.0", None, 1, ""),
        ("glibc 2.17", None, 1, "glibc 2.17 is older than 2.26"),
        ("musl", None, 1, "the C library is musl"),
        ("no glibc", None, 1, "the C library is no glibc"),
        (None, None, 1, "the C library is unknown"),
        ("glibc 2.36", 16 * GIB, 2, ""),
        (
            "glibc 2.36",
            16 * GIB - 1,
            2,
            "the control group allows 8.0 GiB of memory per rank, and 8 GiB are needed to keep freed memory",
        ),
        (
            "glibc 2.36",
            6 * GIB,
            4,
            "the control group allows 1.5 GiB of memory per rank, and 8 GiB are needed to keep freed memory",
        ),
        ("musl", 1 * GIB, 4, "the C library is musl"),
    ],
)
def test_reasons_not_to_tune_malloc(libc: str | None, limit: int | None, ranks: int, why: str) -> None:
    assert why_untuned(libc, limit, ranks) == why


@pytest.mark.parametrize(
    ("libc", "error"), [("glibc 2.36", ""), (None, ""), ("musl", "allocator glibc: the C")]
)
def test_an_unsuitable_glibc_is_an_error(libc: str | None, error: str) -> None:
    if not error:
        demand_glibc(libc)
        return
    with pytest.raises(PlanError, match=error):
        demand_glibc(libc)


def keeps(*but: str) -> str:
    return ":".join(f"glibc.malloc.{n}" for n in OURS if n.partition("=")[0] not in but)


OURS = ("mmap_max=0", "trim_threshold=17179869184", "top_pad=67108864", "mxfast=0", "tcache_count=0")


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        ({}, keeps()),
        ({"GLIBC_TUNABLES": ""}, keeps()),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=8"}, f"glibc.rtld.nns=8:{keeps()}"),
        ({"GLIBC_TUNABLES": "glibc.malloc.top_pad=1"}, f"glibc.malloc.top_pad=1:{keeps('top_pad')}"),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.mxfast=64:glibc.malloc.arena_max=2:glibc.malloc.tcache_count=7"},
            "glibc.malloc.mxfast=64:glibc.malloc.arena_max=2:glibc.malloc.tcache_count=7:"
            + keeps("mxfast", "tcache_count"),
        ),
        # the name in malloc(3)
        ({"MALLOC_TRIM_THRESHOLD_": "1"}, keeps("trim_threshold")),
        ({"MALLOC_MMAP_MAX_": "9", "MALLOC_TOP_PAD_": "0"}, keeps("mmap_max", "top_pad")),
        (
            {"GLIBC_TUNABLES": ":".join(f"{name}=1" for name in KEEP)},
            ":".join(f"{name}=1" for name in KEEP),
        ),
    ],
)
def test_the_users_tunables_win_and_others_are_kept(users: dict[str, str], expected: str) -> None:
    assert tunables(users) == expected
