"""Binding: machine x request -> CPUs of each rank, as tables in ``bindings/``, and properties of all
bindings.

Each file is named after its machine.  A case is a request after ``==``; below are the ranks, or the error.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.bindings import bound, requests, topologies
from support.machines import MACHINES, machine, table

from cpulaunch.errors import PlanError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.topology import Core, Cpu, Topology
from cpulaunch.plan.binding import bind
from cpulaunch.plan.request import BindingRequest


def cases() -> list[tuple[str, str, str]]:
    found = []
    for name in MACHINES:
        for case in (Path(__file__).parent / "bindings" / f"{name}.txt").read_text().split("== ")[1:]:
            request, _, expected = case.partition("\n")
            found.append((name, request, expected.strip()))
    return found


@pytest.mark.parametrize(("name", "request_", "expected"), cases())
def test_each_request_has_the_binding_in_the_table(name: str, request_: str, expected: str) -> None:
    request = BindingRequest.from_json(json.loads(request_))
    try:
        got = table(bind(machine(name), request))
    except PlanError as error:
        got = f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else "")
    assert got == expected


def core_of(topology: Topology) -> dict[int, Core]:
    return {cpu: core for core in topology.cores for cpu in core.cpus}


def physical(topology: Topology, cpus: CoreSet) -> set[Core]:
    return {core_of(topology)[cpu] for cpu in cpus}


def usable(topology: Topology, request: BindingRequest) -> list[Core]:
    fast = [core for core in topology.cores if request.e_cores or not core.efficient]
    return fast or list(topology.cores)


def room(topology: Topology, request: BindingRequest, size: int) -> int:
    """Return how many ranks of ``size`` cores fit into the NUMA nodes."""
    return sum(count // size for count in Counter(core.node for core in usable(topology, request)).values())


@given(topologies(), requests)
def test_ranks_have_disjoint_and_nonempty_sets_of_allowed_cores(
    topology: Topology, request: BindingRequest
) -> None:
    binding = bound(topology, request)
    given_out: Counter[int] = Counter()
    for rank in binding.ranks:
        assert rank.cores
        assert rank.threads >= 1
        assert rank.cores | rank.comm_cores <= topology.allowed
        given_out.update(rank.cores)
        given_out.update(rank.comm_cores)
    assert not binding.idle & CoreSet(given_out)
    assert binding.oversubscribed == (max(given_out.values()) > 1)
    if not request.oversubscribe:
        assert not binding.oversubscribed


@given(topologies(), requests)
def test_no_physical_core_serves_two_ranks(topology: Topology, request: BindingRequest) -> None:
    binding = bound(topology, replace(request, oversubscribe=False))
    serving: Counter[Core] = Counter()
    for rank in binding.ranks:
        serving.update(physical(topology, rank.cores | rank.comm_cores))
    assert max(serving.values()) == 1
    assert not set(serving) & physical(topology, binding.idle)
    assert set(serving) | physical(topology, binding.idle) == set(usable(topology, request))


@given(topologies(), requests)
def test_every_rank_gets_equally_many_cores(topology: Topology, request: BindingRequest) -> None:
    assume(request.cores_per_rank != "max")
    binding = bound(topology, request)
    sizes = {len(physical(topology, rank.cores | rank.comm_cores)) for rank in binding.ranks}
    assert len(sizes) == 1
    if isinstance(request.cores_per_rank, int):
        assert sizes == {request.cores_per_rank}
    elif not binding.oversubscribed:
        even = len(usable(topology, request)) // len(binding.ranks)
        within = max(
            (size for size in range(1, even + 1) if room(topology, request, size) >= len(binding.ranks)),
            default=0,
        )
        assert sizes == {within if request.bind_numa or within >= 0.9 * even else even}


@given(topologies(), requests)
def test_max_leaves_no_usable_core_idle(topology: Topology, request: BindingRequest) -> None:
    binding = bound(topology, replace(request, cores_per_rank="max"))
    nodes = CoreSet(node for rank in binding.ranks for node in rank.numa_nodes)
    assert not [core for core in physical(topology, binding.idle) if core.node in nodes]
    if not request.bind_numa:
        assert not binding.idle


@given(topologies(), requests)
def test_ranks_bound_to_nodes_do_not_span_them(topology: Topology, request: BindingRequest) -> None:
    for rank in bound(topology, replace(request, bind_numa=True)).ranks:
        assert len(rank.numa_nodes) == 1


def three_and_one_cores() -> Topology:
    """Two NUMA nodes where two ranks of two cores fit only if one of them spans both."""
    return Topology(tuple(Cpu(i, i, 0, node) for i, node in enumerate((0, 0, 0, 1))))


@given(topologies(), requests)
@example(three_and_one_cores(), BindingRequest(ranks=2, worker_count=1))
@example(three_and_one_cores(), BindingRequest(ranks=2, worker_count=0))
def test_a_rank_spans_nodes_only_if_that_leaves_fewer_cores_idle(
    topology: Topology, request: BindingRequest
) -> None:
    """If a rank spans nodes, bindings without a spanning rank leave more cores idle."""
    request = replace(request, cores_per_rank="auto", oversubscribe=False)
    binding = bound(topology, request)
    spanning = any(len(rank.numa_nodes) > 1 for rank in binding.ranks)
    within_nodes = replace(request, bind_numa=True)
    try:
        within, refused = bind(topology, within_nodes), ""
    except PlanError as error:
        within, refused = binding, str(error)
    if not spanning:
        assert within.ranks == binding.ranks
        assert not refused
    elif refused:
        # Ranks of one core would fit, so only their workers can need more cores.
        assert "no compute core left" in refused
    else:
        idle = [len(physical(topology, each.idle)) for each in (binding, within)]
        assert idle[0] < idle[1]


@pytest.mark.parametrize(
    ("per_node", "ranks", "cores", "spanning"),
    [
        ((48, 46), 2, 46, 0),
        ((96, 94), 4, 47, 0),
        ((20, 22, 22), 3, 20, 0),
        ((28, 28), 3, 18, 1),
        ((48, 30), 2, 39, 1),
        ((10, 8), 2, 9, 1),
    ],
)
def test_ranks_stay_within_nodes_if_that_costs_them_few_cores(
    per_node: tuple[int, ...], ranks: int, cores: int, spanning: int
) -> None:
    nodes = [node for node, count in enumerate(per_node) for _ in range(count)]
    topology = Topology(tuple(Cpu(i, i, node, node) for i, node in enumerate(nodes)))
    binding = bind(topology, BindingRequest(ranks=ranks, dedicate_workers=False))
    assert {len(rank.cores) for rank in binding.ranks} == {cores}
    assert sum(len(rank.numa_nodes) > 1 for rank in binding.ranks) == spanning


@given(topologies(), requests)
def test_a_rank_gets_the_nodes_of_its_cores_and_ranks_follow_node_order(
    topology: Topology, request: BindingRequest
) -> None:
    binding = bound(topology, request)
    node = {c.cpu: c.node for c in topology.cpus}
    assert [rank.local_rank for rank in binding.ranks] == list(range(len(binding.ranks)))
    for rank in binding.ranks:
        assert rank.numa_nodes == CoreSet(node[cpu] for cpu in rank.cores | rank.comm_cores)
    if not binding.oversubscribed:
        firsts = [min(rank.numa_nodes) for rank in binding.ranks]
        assert firsts == sorted(firsts)


@given(topologies(), requests)
def test_threads_are_the_physical_compute_cores_or_the_quota(
    topology: Topology, request: BindingRequest
) -> None:
    binding = bound(topology, request)
    for rank in binding.ranks:
        if request.threads != "auto":
            assert rank.threads == request.threads
        elif topology.quota is None:
            assert rank.threads == len(physical(topology, rank.cores))
        else:
            assert rank.threads == 1 or rank.threads * len(binding.ranks) <= topology.quota
            assert rank.threads <= len(physical(topology, rank.cores))


@given(topologies(), requests)
def test_siblings_are_used_only_on_request(topology: Topology, request: BindingRequest) -> None:
    request = replace(request, oversubscribe=False)
    for rank in bound(topology, request).ranks:
        for core in physical(topology, rank.cores):
            taken = [cpu for cpu in core.cpus if cpu in rank.cores or cpu in rank.comm_cores]
            lent = bool(CoreSet(core.cpus) & rank.comm_cores)
            assert taken == (list(core.cpus) if request.logical_cores or lent else [core.cpus[0]])


@given(topologies(), requests)
def test_all_workers_have_a_cpu_or_none_has(topology: Topology, request: BindingRequest) -> None:
    binding = bound(topology, replace(request, dedicate_workers=True))
    assert binding.worker_count == (request.worker_count or 1 if request.worker_count != "auto" else 1)
    assert len(binding.worker_affinity) in (0, binding.worker_count * len(binding.ranks))
    assert set(binding.worker_affinity) == {cpu for rank in binding.ranks for cpu in rank.comm_cores}
    if request.worker_count == "auto":
        with_workers = [rank for rank in binding.ranks if rank.comm_cores]
        assert all(len(physical(topology, rank.cores | rank.comm_cores)) >= 4 for rank in with_workers)
    elif request.worker_count and not binding.oversubscribed:
        assert {len(rank.comm_cores) for rank in binding.ranks} == {request.worker_count}


@given(topologies(), requests)
def test_other_backends_have_no_workers(topology: Topology, request: BindingRequest) -> None:
    binding = bound(topology, replace(request, dedicate_workers=False))
    assert (binding.worker_count, binding.worker_affinity) == (0, ())
    assert not any(rank.comm_cores for rank in binding.ranks)


@given(topologies(), requests)
def test_shared_cores_are_shared_evenly(topology: Topology, request: BindingRequest) -> None:
    """With more ranks than cores, the numbers of ranks per core of a node differ by at most one."""
    request = replace(request, oversubscribe=True, cores_per_rank="auto", bind_numa=False)
    cores = usable(topology, request)
    request = replace(request, ranks=len(cores) + (request.ranks or 1))
    binding = bind(topology, request)
    load = Counter(core for rank in binding.ranks for core in physical(topology, rank.cores))
    assert set(load) == set(cores)
    for node in {core.node for core in cores}:
        loads = [load[core] for core in cores if core.node == node]
        assert max(loads) - min(loads) <= 1


@given(topologies(), requests)
def test_only_the_impossible_is_refused(topology: Topology, request: BindingRequest) -> None:
    request = replace(request, cores_per_rank="auto", bind_numa=False, ccl_logical_cores=False)
    cores = usable(topology, request)
    ranks = request.ranks or len({core.node for core in cores})
    workers = 0 if request.worker_count == "auto" or not request.dedicate_workers else request.worker_count
    possible = request.oversubscribe or len(cores) // ranks > workers
    try:
        bind(topology, request)
    except PlanError:
        assert not possible
    else:
        assert possible


@given(st.lists(st.integers(1, 12), min_size=2, max_size=5), st.integers(1, 16))
def test_the_fewest_possible_ranks_span_nodes(sizes: list[int], ranks: int) -> None:
    """The number is compared with all ways to leave cores idle at the ends of nodes."""
    assume(ranks <= sum(sizes))
    size = sum(sizes) // ranks
    assume(size < 10)  # larger ranks may all get fewer cores, to stay within nodes
    cpus = [node for node, count in enumerate(sizes) for _ in range(count)]
    topology = Topology(tuple(Cpu(i, i, 0, node) for i, node in enumerate(cpus)))
    binding = bind(topology, BindingRequest(ranks=ranks, dedicate_workers=False))

    def fewest(start: int, to_go: int) -> float:
        if not to_go:
            return 0
        if start + size > len(cpus):
            return float("inf")
        here = (cpus[start] != cpus[start + size - 1]) + fewest(start + size, to_go - 1)
        end = start + cpus[start:].count(cpus[start])
        return min(here, fewest(end, to_go)) if end - start < size else here

    assert sum(len(rank.numa_nodes) > 1 for rank in binding.ranks) == fewest(0, ranks)


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 40), st.integers(1, 4))
def test_scatter_fills_equal_nodes_evenly_and_close_packs_them(
    nodes: int, per_node: int, ranks: int, size: int
) -> None:
    assume(ranks <= nodes * (per_node // size))
    topology = Topology(tuple(Cpu(i, i, 0, i // per_node) for i in range(nodes * per_node)))
    request = BindingRequest(ranks=ranks, cores_per_rank=size, dedicate_workers=False)
    on_node = Counter(min(rank.numa_nodes) for rank in bind(topology, request).ranks)
    counts = [on_node[node] for node in range(nodes)]
    assert max(counts) - min(counts) <= 1
    packed = bind(topology, replace(request, strategy="close"))
    assert sum(len(rank.numa_nodes) for rank in packed.ranks) == ranks
    full = per_node // size
    assert [min(rank.numa_nodes) for rank in packed.ranks] == [rank // full for rank in range(ranks)]


@given(topologies(), requests)
def test_unpinned_ranks_have_all_cores_and_the_threads_of_their_share(
    topology: Topology, request: BindingRequest
) -> None:
    request = replace(request, bind_numa=False, dedicate_workers=False)
    pinned, free = bound(topology, request), bound(topology, replace(request, strategy="none"))
    used = CoreSet(cpu for rank in pinned.ranks for cpu in rank.cores)
    # With `max`, pinned ranks also get their node's idle cores, which may be more or fewer on other nodes.
    assert sum(rank.threads for rank in free.ranks) == sum(rank.threads for rank in pinned.ranks)
    if request.cores_per_rank != "max":
        assert [rank.threads for rank in free.ranks] == [rank.threads for rank in pinned.ranks]
    assert {rank.cores for rank in free.ranks} == {used | pinned.idle}
    assert not any(rank.places or rank.comm_cores for rank in free.ranks)
    assert free.idle == CoreSet()


@pytest.mark.parametrize("conflict", [{"bind_numa": True}, {"worker_count": 1}])
def test_unpinned_ranks_have_no_exclusive_cores(conflict: dict[str, Any]) -> None:
    topology = Topology(tuple(Cpu(i, i, 0, i // 2) for i in range(4)))
    with pytest.raises(PlanError, match="--strategy none"):
        bind(topology, BindingRequest(strategy="none", **conflict))


@given(requests)
def test_a_request_round_trips(request: BindingRequest) -> None:
    for each in (request, replace(request, cores=CoreSet([0, 3]), numa_nodes=CoreSet([1]))):
        assert BindingRequest.from_json(json.loads(json.dumps(each.to_json()))) == each


def test_a_request_is_written_without_defaults() -> None:
    assert BindingRequest().to_json() == {}
    assert BindingRequest(ranks=2, cores=CoreSet.parse("0-3")).to_json() == {"ranks": 2, "cores": "0-3"}


@pytest.mark.parametrize(
    ("request_", "affinity"),
    [
        (BindingRequest(ranks=4), (0, 14, 28, 42)),
        (BindingRequest(worker_count=2), (0, 1, 28, 29)),
        (BindingRequest(worker_count=2, ccl_logical_cores=True), (56, 57, 84, 85)),
        (BindingRequest(ranks=28), ()),
        (BindingRequest(worker_count=0), ()),
        (BindingRequest(dedicate_workers=False), ()),
        (BindingRequest(cores=CoreSet([0, 1]), ranks=2, worker_count=2, oversubscribe=True), (0, 0, 1, 1)),
    ],
)
def test_worker_affinity_is_one_list_per_host(request_: BindingRequest, affinity: tuple[int, ...]) -> None:
    assert bind(machine("xeon-2x28"), request_).worker_affinity == affinity


def test_a_host_without_cpus_is_refused() -> None:
    with pytest.raises(PlanError, match="no cores to use on this host"):
        bind(Topology(()), BindingRequest())
