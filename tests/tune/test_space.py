"""The candidates on different machines."""

from __future__ import annotations

import pytest
from support.plans import BIG, INTEL, PROGRAM, SMALL

from cpulaunch.config.config import Config
from cpulaunch.config.load import load
from cpulaunch.model.facts import Facts, HostFacts
from cpulaunch.model.hosts import parse_hosts
from cpulaunch.tune.space import Space, Values


def space(
    *settings: str, host: HostFacts = BIG, hosts: str = "", oneccl: bool = False, **environ: str
) -> Space:
    given = [(*setting.split("=", 1), "--" + setting.split("=")[0]) for setting in settings]
    config = load(given, environ={"HOME": "/nowhere", **environ})
    listed = parse_hosts(hosts, "--hosts") if hosts else ()
    facts = Facts(like=host, listed=listed, here=frozenset({"localhost"}), mpis=(INTEL,))
    return Space(config, facts, PROGRAM, lambda name: name == "native", oneccl)


def tried(space: Space) -> list[dict[str, object]]:
    """Return the candidates of all stages, as if no candidate were faster than the default."""
    return [{s.key: value for s, value in values.items()} for stage in space.stages for values in stage({})]


def test_numbers_of_ranks_are_the_numa_nodes_times_powers_of_two() -> None:
    counts = {values.get("hosts.nproc_per_node", 2) for values in tried(space())}
    assert counts == {1, 2, 4, 8, 16, 32}  # two sockets of 28 cores; the default is one per node


def test_values_that_change_nothing_are_left_out() -> None:
    settings = tried(space(host=SMALL))
    assert settings[:3] == [
        {"hosts.nproc_per_node": 2},
        {"cpu.strategy": "none"},
        {"training.precision": "bf16"},
    ]
    assert all(values and len(values) == 1 for values in settings)


@pytest.mark.parametrize(
    ("settings", "environ"), [(["hosts.nproc=4"], {}), ([], {"CPULAUNCH_HOSTS_NPROC_PER_NODE": "4"})]
)
def test_settings_that_the_user_chose_are_not_varied(settings: list[str], environ: dict[str, str]) -> None:
    keys = {key for values in tried(space(*settings, "training.precision=fp32", **environ)) for key in values}
    assert {"cpu.logical_cores", "cpu.allocator"} <= keys
    assert not {"hosts.nproc", "hosts.nproc_per_node", "training.precision"} & keys


def test_allocators_that_are_not_installed_are_not_tried() -> None:
    assert not any(
        values.get("cpu.allocator") == "jemalloc" for values in tried(space(host=without_libraries()))
    )


def without_libraries() -> HostFacts:
    return HostFacts(BIG.topology, libraries={}, libc="glibc 2.36")


def test_communication_is_tried_with_several_ranks() -> None:
    def keys(where: Space) -> set[str]:
        return {key for values in tried(where) for key in values}

    several = {"ccl.transport", "ccl.worker_count", "training.bucket_mb", "training.backend"}
    assert not several & keys(space("hosts.nproc=1", host=SMALL))
    assert "ccl.transport" not in keys(space(oneccl=True))
    assert several <= keys(space(hosts="a,b", oneccl=True))


def test_each_candidate_can_be_planned() -> None:
    where = space(hosts="a:2,b:2")
    for stage in where.stages:
        values: Values
        for values in stage({}):
            assert where.plan(values).world_size >= 2
    assert not where.is_fixed(Config.hosts.nproc)
