"""Where OpenMP's threads go, and which memory policy a rank has: variables and words that follow from a rank."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from support.machines import machine

from cpulaunch.model.cores import CoreSet
from cpulaunch.model.topology import Topology
from cpulaunch.plan.binding import RankBinding, bind
from cpulaunch.plan.environment import memory_policy, places_environment
from cpulaunch.plan.request import BindingRequest
from plan.test_binding import bound, requests, topologies


@pytest.mark.parametrize(
    ("name", "request_", "rank", "expected"),
    [
        ("xeon-2x28", BindingRequest(ranks=4), 1, "{15:13},{16}:12"),
        ("xeon-2x28", BindingRequest(ranks=4, logical_cores=True), 0, "{1:13,57:13},{2,58}:12"),
        ("xeon-2x28", BindingRequest(ranks=56), 0, None),  # one thread needs no place of its own
        (
            "xeon-2x28",
            BindingRequest(ranks=2, threads=4),
            0,
            None,
        ),  # as many threads as cores, or let them be
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
    """The places that an OMP_PLACES means, by OpenMP 5.2, 21.1.6: ``{lower:length},…`` and ``{…}:number:stride``."""
    places = []
    for inside, number, stride in re.findall(r"\{([^}]*)\}(?::(\d+))?(?::(\d+))?", text):
        cpus = []
        for part in inside.split(","):
            lower, _, length = part.partition(":")
            cpus += range(int(lower), int(lower) + int(length or 1))
        places += [CoreSet(cpu + i * int(stride or 1) for cpu in cpus) for i in range(int(number or 1))]
    return places


@given(topologies(), requests)
def test_the_first_place_is_the_whole_rank_and_the_others_are_its_other_cores(
    topology: Topology, request: BindingRequest
) -> None:
    for rank in bound(topology, request).ranks:
        text = places_environment(rank, intel_openmp=False).get("OMP_PLACES")
        if text is None:
            assert rank.threads == 1 or rank.threads != len(rank.places)
            continue
        places = expanded(text)
        assert len(places) == rank.threads
        assert places[0] == rank.cores
        assert places[1:] == list(rank.places[1:])
        assert not any(place & rank.comm_cores for place in places)


def rank_on(nodes: str) -> RankBinding:
    return RankBinding(0, CoreSet([0]), CoreSet(), CoreSet.parse(nodes), 1)


@pytest.mark.parametrize(
    ("name", "nodes", "strict", "expected"),
    [
        ("xeon-2x28", "1", False, "prefer:1"),
        ("xeon-2x28", "1", True, "bind:1"),
        ("xeon-2x28", "0-1", False, ""),  # each thread takes what is near to it: the kernel's own way
        ("xeon-max-hbm", "0", False, "prefer:0"),
        ("vm-8-adjacent", "0", False, ""),
        ("vm-8-adjacent", "0", True, ""),
    ],
)
def test_memory_policies(name: str, nodes: str, strict: bool, expected: str) -> None:
    assert memory_policy(rank_on(nodes), machine(name), strict) == expected
