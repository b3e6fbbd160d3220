"""One host's plan, by the function that both the planner and the agents call."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bindings import bound, requests, topologies
from support.machines import machine
from support.plans import BIG, make

from cpulaunch.agent.launch.rebind import rebind_on_host
from cpulaunch.errors import PlanError
from cpulaunch.model.facts import HostFacts
from cpulaunch.model.topology import Topology
from cpulaunch.plan.binding import bind
from cpulaunch.plan.environment import AFFINITY, THREADS
from cpulaunch.plan.host import HostInput, plan_host
from cpulaunch.plan.request import BindingRequest, HostRequest

FOUND = {"tcmalloc": "/t/libtcmalloc.so.4", "intel": "/i/libiomp5.so", "torch": "/torch/libgomp.so.1"}
FACTS = HostFacts(machine("xeon-2x28"), libraries=FOUND)
BINDING = bind(FACTS.topology, BindingRequest())


@given(topologies(), requests)
def test_ranks_have_the_cores_of_the_binding(topology: Topology, request: BindingRequest) -> None:
    binding = bound(topology, request)
    planned = plan_host(HostInput("a", HostFacts(topology), binding), HostRequest(request))
    for rank, bound_rank in zip(planned.ranks, binding.ranks, strict=True):
        for name in ("local_rank", "cores", "comm_cores", "numa_nodes", "threads"):
            assert getattr(rank, name) == getattr(bound_rank, name)
        assert rank.env[THREADS] == str(bound_rank.threads)
    assert (AFFINITY in planned.env) == bool(binding.worker_affinity)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        (AFFINITY, AFFINITY),
        ("OMP_PLACES", "OMP_PLACES"),
        ("GOMP_CPU_AFFINITY", "OMP_PLACES"),
        ("KMP_AFFINITY", "OMP_PLACES"),
    ],
)
def test_variables_of_the_user_are_left_out(name: str, missing: str) -> None:
    host = HostInput("a", FACTS, BINDING)
    others, users = (
        plan_host(host, HostRequest()),
        plan_host(replace(host, user_env={name: "x"}), HostRequest()),
    )
    assert missing in {**others.env, **others.ranks[0].env}
    assert missing not in {**users.env, **users.ranks[0].env}


def test_the_variables_of_its_network_come_first_and_libraries_last() -> None:
    host = HostInput("a", FACTS, BINDING, env={"GLOO_SOCKET_IFNAME": "eth0"})
    planned = plan_host(host, HostRequest(openmp="intel"))
    assert list(planned.env) == ["GLOO_SOCKET_IFNAME", AFFINITY, "KMP_BLOCKTIME", "LD_PRELOAD"]
    assert (planned.allocator, planned.openmp) == ("tcmalloc", "intel")


def test_a_library_that_cannot_be_used_is_an_error() -> None:
    with pytest.raises(PlanError, match="allocator jemalloc: jemalloc was not found"):
        plan_host(HostInput("a", FACTS, BINDING), HostRequest(allocator="jemalloc"))


@given(
    requests, st.sampled_from(["auto", "tcmalloc", "default"]), st.sampled_from(["auto", "intel", "default"])
)
def test_a_request_round_trips(binding: BindingRequest, allocator: str, openmp: str) -> None:
    request = HostRequest(binding, allocator, openmp)
    assert HostRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["hosts.nproc_per_node=4"],
        ["ccl.worker_count=2", "ccl.logical_cores=true"],
        ["training.backend=gloo", "cpu.cores_per_rank=max"],
        ["cpu.bind_numa=true", "cpu.openmp=intel", "cpu.threads=3"],
        ["hosts.nproc_per_node=20", "ccl.worker_count=0"],
        ["hosts.nproc_per_node=70", "hosts.oversubscribe=true"],
        ["env=OMP_PLACES=cores", "env=CCL_WORKER_AFFINITY=0,1"],
        ["ccl.interface=ib0", "ccl.provider=verbs"],
    ],
)
def test_agents_on_a_host_that_is_as_assumed_make_the_same_plan(settings: list[str]) -> None:
    """On an uninspected host, the agent makes the plan; here, it finds the facts that the planner assumed."""
    facts = replace(BIG, libraries=FOUND)
    planned = make(*settings, hosts="a", facts=facts)
    (host,) = planned.hosts
    assert host.assumed
    request = json.loads(json.dumps(planned.request.to_json()))
    users = {name: planned.env[name] for name in planned.private}
    again = rebind_on_host(host, facts, request, users)
    shared = {name: planned.env[name] for name in (THREADS,) if name in planned.env}
    assert again.env == host.env
    assert [{**shared, **rank.env} for rank in host.ranks] == [rank.env for rank in again.ranks]
    assert [rank[:-1] for rank in again.ranks] == [rank[:-1] for rank in host.ranks]
