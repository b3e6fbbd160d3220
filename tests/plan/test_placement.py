"""The plan as it is sent to the agents: it round-trips, and is small."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import make, thousand_different_hosts

from cpulaunch import launchers, variables
from cpulaunch.errors import PlanError
from cpulaunch.launchers.command import Installation
from cpulaunch.model.cores import CoreSet
from cpulaunch.plan.placement import (
    HostPlan,
    IdentityVariables,
    Placement,
    RankPlan,
    guard,
    unguard,
)
from cpulaunch.plan.plan import Plan


def travelling(plan: Plan) -> dict[str, str]:
    """Return the variables that carry ``plan`` to the agents."""
    commands = launchers.load(plan.launcher).commands(
        plan, Installation("/agent.py", "/ssh.sh", "/spawner.py")
    )
    return {name: value for name, value in commands[0].env.items() if name in variables.PLACEMENT}


core_sets = st.sets(st.integers(0, 300), max_size=20).map(CoreSet)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
rank_plans = st.builds(
    RankPlan,
    st.just(0),
    core_sets,
    core_sets,
    core_sets,
    st.integers(1, 99),
    st.just(()),
    texts,
    st.dictionaries(texts, texts),
)
ranks_of_hosts = st.lists(rank_plans, max_size=3).map(
    lambda ranks: tuple(rank._replace(local_rank=number) for number, rank in enumerate(ranks))
)
host_plans = st.tuples(texts, st.booleans(), st.dictionaries(texts, texts), ranks_of_hosts).map(
    lambda known: HostPlan(*known)
)


def different(placement: Placement) -> int:
    """Return the number of different hosts in the text.  Equal hosts share an entry."""
    return len({id(host.ranks) for host in placement.hosts})


@given(st.lists(host_plans, min_size=1, max_size=3), st.dictionaries(texts, texts))
def test_a_placement_round_trips(hosts: list[HostPlan], env: dict[str, str]) -> None:
    placement = Placement(
        launcher="x",
        identity=IdentityVariables("R", "S", "L"),
        agents_are_children=False,
        daemon_outlives_link=True,
        python=True,
        directory="/home/me",
        hosts=hosts,
        request={"binding": {}},
        env=env,
        hidden=["SLURM_PROCID"],
        heartbeat_timeout=30,
        grace_period=2.5,
        lenient=False,
        telemetry=True,
    )
    assert Placement.from_variables(placement.to_variables()) == placement


def test_a_placement_has_the_planned_values() -> None:
    plan = make("hosts.nproc_per_node=4", "env=SECRET=s", hosts="a,b")
    placement = Placement.from_variables(travelling(plan))
    assert [host.host for host in placement.hosts] == ["a", "b"]
    assert [host[:4] for host in placement.hosts] == [host[:4] for host in plan.hosts]
    assert placement.env == {"SECRET": "s"}
    assert tuple(placement.hidden) == plan.hidden
    assert placement.request == json.loads(json.dumps(plan.request.to_json()))


def test_a_thousand_equal_hosts_take_a_few_kilobytes_more_than_one() -> None:
    """On Linux, a variable may have at most 128 KB."""
    one, thousand = (travelling(make("hosts.nproc_per_node=8", hosts=hosts)) for hosts in ("n1", "n[1-1024]"))
    assert different(Placement.from_variables(thousand)) == 1
    assert len(thousand["CPULAUNCH_PLACEMENT"]) - len(one["CPULAUNCH_PLACEMENT"]) < 16_000


def test_a_thousand_different_hosts_fit_into_variables() -> None:
    plan = thousand_different_hosts()
    parts = travelling(plan)
    assert all(len(f"{name}={value}\0") <= 128 * 1024 for name, value in parts.items())
    placement = Placement.from_variables(parts)
    assert different(placement) == 1024
    assert [host[:4] for host in placement.hosts] == [host[:4] for host in plan.hosts]


def test_a_placement_too_large_for_variables_is_an_error() -> None:
    noise = random.Random(0).randbytes(2 << 20).hex()
    with pytest.raises(PlanError, match=r"the plan of 1 hosts takes \d+ bytes; agents can receive 983040"):
        travelling(make(f"env=NOISE={noise}"))


@pytest.mark.parametrize("arguments", [[":"], ["a", ":", "b"], ["\\:", "\\\\:"], ["a:b", "\\"], []])
def test_arguments_with_a_meaning_to_mpiexec_are_escaped(arguments: list[str]) -> None:
    assert ":" not in guard(arguments)
    assert unguard(guard(arguments)) == arguments
