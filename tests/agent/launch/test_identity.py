"""An agent's rank, its part of the plan, and the environment of its program."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.agents import placement, run_agent

from cpulaunch import variables
from cpulaunch.agent.launch.environment import (
    Identity,
    assignment,
    identify,
    planned_preloads,
    program_environment,
)
from cpulaunch.errors import HostError
from cpulaunch.model.cores import CoreSet
from cpulaunch.plan.placement import HostPlan, IdentityVariables, Placement, RankPlan

NAMES = IdentityVariables("R", "S", "LR", "LS")


def test_an_identity_is_read_from_the_launchers_own_variables() -> None:
    environ = {"R": "5", "S": "8", "LR": "1", "LS": "4", "RANK": "7", "PMI_RANK": "3"}
    assert identify("x", NAMES, environ) == Identity(5, 8, 1, 4)


def test_the_number_of_local_ranks_may_be_unknown() -> None:
    names = NAMES._replace(local_size="")
    assert identify("x", names, {"R": "5", "S": "8", "LR": "1"}) == Identity(5, 8, 1, None)


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"S": "8", "LR": "1", "LS": "4"}, "x was to start this process, but R is not set"),
        ({"R": "", "S": "8", "LR": "1", "LS": "4"}, "x was to start this process, but R is "),
        ({"R": "5", "S": "8", "LR": "one", "LS": "4"}, "x was to start this process, but LR is one"),
    ],
)
def test_a_missing_identity_is_an_error(environ: dict[str, str], why: str) -> None:
    with pytest.raises(HostError) as raised:
        identify("x", NAMES, environ)
    assert str(raised.value) == why


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "",
            "it received an incomplete plan from the launcher; does something between mpiexec and this process",
        ),
        ('{"launcher":"lo', "it received an incomplete plan from the launcher"),
        (
            '{"version":0}',
            "the launcher's plan has version 0, and this agent reads version 3; install the same",
        ),
    ],
)
def test_an_unreadable_plan_is_an_error_of_the_agent(tmp_path: Path, text: str, why: str) -> None:
    done = run_agent(placement(tmp_path), "", {variables.PLACEMENT[0]: text})
    assert (done.returncode, done.stdout) == (HostError.exit_code, "")
    assert done.stderr.startswith(f"cpulaunch: this process can't know its rank: {why}")
    assert done.stderr.count("\n") == 1


def a_host(host: str, *names: str, **env: str) -> HostPlan:
    ranks = tuple(
        RankPlan(n, CoreSet([n]), CoreSet(), CoreSet([0]), 1, env={"OWN": name})
        for n, name in enumerate(names)
    )
    return HostPlan(host, False, env, ranks)


def three_hosts() -> Placement:
    """Ranks a, b on node0; c, d on node1; e on node2."""
    return placement(
        Path("/"),
        launcher="x",
        hosts=[
            a_host("node0", "a", "b", SHARED="0"),
            a_host("node1", "c", "d", SHARED="1"),
            a_host("node2", "e", SHARED="2"),
        ],
        env={"SECRET": "s"},
    )


@pytest.mark.parametrize(
    ("identity", "host", "own"),
    [
        (Identity(0, 5, 0, 2), (0, "node0"), "a"),
        (Identity(3, 5, 1, 2), (1, "node1"), "d"),
        (Identity(4, 5, 0, None), (2, "node2"), "e"),
    ],
)
def test_a_rank_has_its_part_of_the_plan(identity: Identity, host: tuple[int, str], own: str) -> None:
    found = assignment(three_hosts(), identity)
    assert (found.group_rank, found.host.host) == host
    assert found.rank.env == {"OWN": own}


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        (Identity(0, 4, 0, 2), "x started 4 ranks, but 5 were planned"),
        (
            Identity(2, 5, 2, 3),
            "rank 2 was planned as local rank 0 of 2 on node1, but x made it local rank 2 of 3",
        ),
        (
            Identity(2, 5, 1, None),
            "rank 2 was planned as local rank 0 of 2 on node1, but x made it local rank 1 of 2",
        ),
    ],
)
def test_ranks_that_were_not_started_as_planned_are_an_error(identity: Identity, why: str) -> None:
    with pytest.raises(HostError) as raised:
        assignment(three_hosts(), identity)
    assert str(raised.value) == why


def test_a_programs_environment() -> None:
    placed, identity = three_hosts()._replace(hidden=["SLURM_PROCID"]), Identity(3, 5, 1, 2)
    environ = {
        "HOME": "/home/me", "RANK": "9", "OWN": "environ", "SHARED": "environ", "SECRET": "environ",
        "CPULAUNCH_TOKEN": "t", "CPULAUNCH_CONTROL": "c", "CPULAUNCH_PLACEMENT": "p", "CPULAUNCH_RANK": "0",
        "CPULAUNCH_JOB_ID": "job", "CPULAUNCH_RESTART_COUNT": "1", "SLURM_PROCID": "7", "TORCHELASTIC_RUN_ID": "outer",
    }  # fmt: skip
    assert program_environment(placed, identity, assignment(placed, identity), environ) == {
        "HOME": "/home/me", "OWN": "d", "SHARED": "1", "SECRET": "s", "CPULAUNCH_JOB_ID": "job",
        "CPULAUNCH_JOB_RANK": "3/5",
        "CPULAUNCH_RESTART_COUNT": "1", "RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3", "ROLE_NAME": "default", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "5",
        "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    alone = program_environment(placed, identity, assignment(placed, identity), {})
    assert alone["CPULAUNCH_JOB_ID"] == "pasted"


@pytest.mark.parametrize(
    ("planned", "ours", "added"),
    [
        ("/a.so:/b.so", "", ["/a.so", "/b.so"]),
        ("/a.so:/b.so", "/b.so /c.so", ["/a.so"]),
        ("/a.so", "/a.so", []),
        ("", "/a.so", []),
    ],
)
def test_libraries_that_the_user_preloads_do_not_count_as_the_plans_libraries(
    planned: str, ours: str, added: list[str]
) -> None:
    host = a_host("node0", "a", LD_PRELOAD=planned)
    assert planned_preloads(placement(Path("/")), host, {"LD_PRELOAD": ours}) == added
    assert planned_preloads(placement(Path("/"), env={"LD_PRELOAD": ours}), host, {}) == added
