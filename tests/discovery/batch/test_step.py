"""Hosts that aren't in the current Slurm job, and requeues.  `tests/slurm` has tests with a real Slurm."""

from __future__ import annotations

import pytest

from cpulaunch.config.load import load
from cpulaunch.discovery.batch.allocation import times_requeued
from cpulaunch.discovery.batch.step import demand_inside
from cpulaunch.errors import ConfigError
from cpulaunch.model.hosts import parse_hosts

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
TWO = JOB | {"SLURM_JOB_NODELIST_HET_GROUP_0": "node[0-1]", "SLURM_JOB_NODELIST_HET_GROUP_1": "node2"}
LOGIN = {"localhost", "login"}


@pytest.mark.parametrize(
    ("named", "environ", "launcher", "here", "outside"),
    [
        ("node1,node0:2", JOB, "auto", LOGIN, None),
        ("node1.cluster", JOB, "mpirun", LOGIN, None),
        (
            "node1,node3",
            JOB,
            "auto",
            LOGIN,
            "node3 is not among the nodes of Slurm job 7, which are node[0-1]",
        ),
        ("node3,node4", JOB, "mpirun", LOGIN, "node[3-4] are not among"),
        ("node3", JOB, "slurm", LOGIN, "node3 is not among"),
        ("localhost", JOB, "auto", LOGIN, "localhost is not among"),
        ("localhost", JOB, "auto", {"localhost", "node0"}, None),
        ("192.0.2.1", JOB, "mpirun", LOGIN, "192.0.2.1 is not among"),
        ("192.0.2.1", JOB, "mpirun", {"192.0.2.1", "node0"}, None),
        ("127.0.0.1", {"SLURM_JOB_NODELIST": "localhost"}, "mpirun", set(), None),
        ("node2", TWO, "mpirun", LOGIN, None),
        ("node3", {}, "auto", LOGIN, None),
    ],
)
def test_a_host_outside_the_job_is_refused(
    named: str, environ: dict[str, str], launcher: str, here: set[str], outside: str | None
) -> None:
    given = [("hosts.list", named, "--hosts"), ("launcher", launcher, "--launcher")]
    config, hosts = load(given, environ=environ), parse_hosts(named, "--hosts")
    if outside is None:
        demand_inside(config, hosts, here)
        return
    with pytest.raises(ConfigError) as error:
        demand_inside(config, hosts, here)
    assert str(error.value).startswith(f"hosts.list (--hosts): {outside}")


@pytest.mark.parametrize(("text", "times"), [("3", 3), ("", 0), ("x", 0), (None, 0)])
def test_the_number_of_requeues_is_read(text: str | None, times: int) -> None:
    assert times_requeued({} if text is None else {"SLURM_RESTART_COUNT": text}) == times
