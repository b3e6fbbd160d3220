"""Variables that follow from a host's libraries and from a rank's CPUs."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from support.bindings import bound, requests, topologies
from support.machines import machine

from cpulaunch.errors import PlanError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.topology import Topology
from cpulaunch.plan.binding import bind
from cpulaunch.plan.environment import (
    HOW_TO_GET,
    LEFT_OUT,
    Libraries,
    choose_libraries,
    memory_policy,
    places_environment,
)
from cpulaunch.plan.malloc import KEEP
from cpulaunch.plan.placement import RankPlan
from cpulaunch.plan.request import BindingRequest

FOUND = {
    "tcmalloc": "/t/libtcmalloc_minimal.so.4",
    "jemalloc": "/j/libjemalloc.so.2",
    "intel": "/i/libiomp5.so",
}


GOMP = {"torch": "/torch/lib/libgomp.so.1"}
KEEPS = ":".join(f"{name}={value}" for name, value in KEEP.items())
MUSL = "the C library is musl"


def chosen_of(found, allocator, openmp, users, untuned=MUSL) -> Libraries:
    return choose_libraries(found, allocator, openmp, users, untuned)


@pytest.mark.parametrize(
    ("found", "allocator", "openmp", "users", "expected"),
    [
        # nothing found, nothing requested
        ({}, "auto", "auto", {}, {}),
        (None, "auto", "auto", {}, {}),
        # auto uses libraries that were measured to help
        (FOUND, "auto", "auto", {}, {"LD_PRELOAD": "/t/libtcmalloc_minimal.so.4"}),
        (FOUND, "default", "default", {}, {}),
        (FOUND, "default", "intel", {}, {"LD_PRELOAD": "/i/libiomp5.so", "KMP_BLOCKTIME": "1"}),
        (
            FOUND,
            "tcmalloc",
            "intel",
            {},
            {"LD_PRELOAD": "/t/libtcmalloc_minimal.so.4:/i/libiomp5.so", "KMP_BLOCKTIME": "1"},
        ),
        # this torch ships with Intel's runtime
        ({"torch": "/torch/lib/libiomp5.so"}, "auto", "intel", {}, {"KMP_BLOCKTIME": "1"}),
        ({"torch": "/torch/lib/libiomp5.so"}, "auto", "auto", {}, {"KMP_BLOCKTIME": "1"}),
        # an uninspected host: a name for the linker to find
        (None, "default", "intel", {}, {"LD_PRELOAD": "libiomp5.so", "KMP_BLOCKTIME": "1"}),
        # the user's own preload stays, and comes first
        (
            FOUND,
            "auto",
            "auto",
            {"LD_PRELOAD": "/my/libfoo.so /my/bar.so"},
            {"LD_PRELOAD": "/my/libfoo.so:/my/bar.so:/t/libtcmalloc_minimal.so.4"},
        ),
        (FOUND, "auto", "auto", {"LD_PRELOAD": "/my/libjemalloc.so"}, {}),
        (FOUND, "default", "auto", {"LD_PRELOAD": "/my/libmimalloc.so.2"}, {}),
        (FOUND, "jemalloc", "auto", {"LD_PRELOAD": "/my/libjemalloc.so"}, {}),
        (
            FOUND,
            "auto",
            "auto",
            {"LD_PRELOAD": "/my/libiomp5.so", "KMP_BLOCKTIME": "200"},
            {"LD_PRELOAD": "/my/libiomp5.so:/t/libtcmalloc_minimal.so.4"},
        ),
    ],
)  # fmt: skip
def test_libraries_are_chosen_by_what_is_installed_and_requested(
    found, allocator, openmp, users, expected
) -> None:
    found = {**GOMP, **found} if found is not None else None
    assert chosen_of(found, allocator, openmp, users).env == expected


@pytest.mark.parametrize("directory", ["/home/me/my env/lib", "/opt/a:b"])
def test_a_path_that_preloading_would_split_is_left_out_with_a_note(directory: str) -> None:
    found = {**GOMP, **FOUND, "jemalloc": f"{directory}/libjemalloc.so.2"}
    chosen = chosen_of(found, "jemalloc", "intel", {})
    assert (chosen.allocator, chosen.openmp) == ("default", "intel")
    assert chosen.env == {"LD_PRELOAD": "/i/libiomp5.so", "KMP_BLOCKTIME": "1"}
    (note,) = chosen.notes
    assert note.startswith("allocator: jemalloc is left out, as LD_PRELOAD takes no space or colon: ")


@pytest.mark.parametrize(
    ("found", "allocator", "users", "untuned", "expected"),
    [
        (FOUND, "auto", {}, "", ("tcmalloc", "it is installed")),
        ({}, "auto", {}, "", ("glibc", "tcmalloc is not installed")),
        ({}, "auto", {}, MUSL, ("default", "tcmalloc is not installed, and the C library is musl")),
        (None, "auto", {}, MUSL, ("default", "what is installed is unknown")),
        ({"tcmalloc": "/a b/t.so"}, "auto", {}, "", ("glibc", f"tcmalloc {LEFT_OUT}")),
        (FOUND, "glibc", {}, MUSL, ("glibc", "asked for")),
        (FOUND, "jemalloc", {}, "", ("jemalloc", "asked for")),
        (FOUND, "default", {}, "", ("default", "asked for")),
        ({}, "auto", {"LD_PRELOAD": "/my/libmimalloc.so.2"}, "", ("mimalloc", "in your LD_PRELOAD")),
    ],
)  # fmt: skip
def test_the_chosen_allocator_and_the_reason(found, allocator, users, untuned, expected) -> None:
    chosen = chosen_of(found, allocator, "auto", users, untuned)
    assert (chosen.allocator, chosen.why_allocator) == expected
    assert chosen.env.get("GLIBC_TUNABLES") == (KEEPS if expected[0] == "glibc" else None)


def test_glibc_is_not_tuned_beside_another_allocator() -> None:
    with pytest.raises(PlanError, match="LD_PRELOAD has jemalloc"):
        chosen_of(FOUND, "glibc", "auto", {"LD_PRELOAD": "/my/libjemalloc.so"}, "")


def test_jemalloc_is_tuned_unless_the_user_has_tuned_it() -> None:
    tuned = chosen_of(FOUND, "jemalloc", "auto", {}).env
    assert set(tuned) == {"LD_PRELOAD", "MALLOC_CONF"}
    assert "background_thread:true" in tuned["MALLOC_CONF"]
    assert set(chosen_of(FOUND, "jemalloc", "auto", {"MALLOC_CONF": "x:1"}).env) == {"LD_PRELOAD"}


@pytest.mark.parametrize(
    ("openmp", "users", "torchs", "intel"),
    [
        ("default", {}, "/torch/lib/libgomp.so.1", False),
        ("default", {}, "/torch/lib/libiomp5.so", True),
        ("intel", {}, "/torch/lib/libgomp.so.1", True),
        ("auto", {"LD_PRELOAD": "/my/libomp.so"}, "/torch/lib/libgomp.so.1", True),
        ("auto", {"LD_PRELOAD": "/my/libgomp.so.1"}, "/torch/lib/libiomp5.so", False),
    ],
)
def test_the_chosen_openmp_runtime(openmp: str, users: dict[str, str], torchs: str, intel: bool) -> None:
    found = {**FOUND, "torch": torchs}
    assert chosen_of(found, "auto", openmp, users).intel_openmp is intel


@pytest.mark.parametrize(
    ("allocator", "openmp", "missing"),
    [("tcmalloc", "auto", "tcmalloc"), ("jemalloc", "auto", "jemalloc"), ("auto", "intel", "intel")],
)
def test_a_missing_requested_library_is_an_error_with_a_remedy(
    allocator: str, openmp: str, missing: str
) -> None:
    with pytest.raises(PlanError, match="was not found") as caught:
        chosen_of(GOMP, allocator, openmp, {})
    assert caught.value.hint == HOW_TO_GET[missing]


@pytest.mark.parametrize(
    ("allocator", "openmp", "preload"),
    [("jemalloc", "auto", "/my/libtcmalloc.so.4"), ("auto", "intel", "/my/libgomp.so.1")],
)
def test_a_contradiction_to_the_users_preload_is_an_error(allocator: str, openmp: str, preload: str) -> None:
    with pytest.raises(PlanError, match=f"LD_PRELOAD has .* \\({preload}\\)"):
        chosen_of(FOUND, allocator, openmp, {"LD_PRELOAD": preload})


@pytest.mark.parametrize(
    ("name", "request_", "rank", "expected"),
    [
        ("xeon-2x28", BindingRequest(ranks=4), 1, "{15:13},{16}:12"),
        ("xeon-2x28", BindingRequest(ranks=4, logical_cores=True), 0, "{1:13,57:13},{2,58}:12"),
        ("xeon-2x28", BindingRequest(ranks=56), 0, None),  # a single thread needs no place
        (
            "xeon-2x28",
            BindingRequest(ranks=2, threads=4),
            0,
            None,
        ),  # as many threads as cores, or unchanged
        ("xeon-2x28", BindingRequest(ranks=60, oversubscribe=True), 0, None),
        ("xeon-2x8-alternating", BindingRequest(ranks=2, worker_count=0), 1, "{1,3,5,7,9,11,13,15},{3}:7:2"),
    ],
)
def test_places_of_gnus_runtime(name: str, request_: BindingRequest, rank: int, expected: str | None) -> None:
    rank = bind(machine(name), request_).ranks[rank]
    assert places_environment(rank, intel_openmp=False).get("OMP_PLACES") == expected


def test_places_of_intels_runtime() -> None:
    rank = bind(machine("xeon-2x28"), BindingRequest(ranks=14, worker_count=0, logical_cores=True)).ranks[1]
    assert places_environment(rank, intel_openmp=True) == {
        "KMP_AFFINITY": "granularity=fine,proclist=[{4,5,6,7,60,61,62,63},{5,61},{6,62},{7,63}],explicit"
    }


def expanded(text: str) -> list[CoreSet]:
    """Return the places in a value of OMP_PLACES (OpenMP 5.2, 21.1.6): ``{lower:length},…`` and
    ``{…}:number:stride``."""
    places = []
    for inside, number, stride in re.findall(r"\{([^}]*)\}(?::(\d+))?(?::(\d+))?", text):
        cpus = []
        for part in inside.split(","):
            lower, _, length = part.partition(":")
            cpus += range(int(lower), int(lower) + int(length or 1))
        places += [CoreSet(cpu + i * int(stride or 1) for cpu in cpus) for i in range(int(number or 1))]
    return places


@given(topologies(), requests)
def test_the_first_place_is_the_whole_rank_and_the_others_are_single_cores(
    topology: Topology, request: BindingRequest
) -> None:
    for rank in bound(topology, request).ranks:
        text = places_environment(rank, intel_openmp=False).get("OMP_PLACES")
        has_places = rank.threads > 1 and rank.threads == len(rank.places)
        assert (text is not None) == has_places
        if text is None:
            continue
        places = expanded(text)
        assert len(places) == rank.threads
        assert places[0] == rank.cores
        assert places[1:] == list(rank.places[1:])
        assert not any(place & rank.comm_cores for place in places)


def rank_on(nodes: str) -> RankPlan:
    return RankPlan(0, CoreSet([0]), CoreSet(), CoreSet.parse(nodes), 1)


@pytest.mark.parametrize(
    ("name", "nodes", "strict", "expected"),
    [
        ("xeon-2x28", "1", False, "prefer:1"),
        ("xeon-2x28", "1", True, "bind:1"),
        ("xeon-2x28", "0-1", False, ""),  # each thread gets near memory, the kernel's default
        ("xeon-max-hbm", "0", False, "prefer:0"),
        ("vm-8-adjacent", "0", False, ""),
        ("vm-8-adjacent", "0", True, ""),
    ],
)
def test_the_memory_policy_of_a_rank(name: str, nodes: str, strict: bool, expected: str) -> None:
    assert memory_policy(rank_on(nodes), machine(name), strict) == expected
