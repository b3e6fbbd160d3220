"""Facts about hosts, as they are recorded and looked up."""

from __future__ import annotations

from support.plans import BIG, SMALL

from cpulaunch.model.facts import Facts, HostFacts


def test_a_recorded_host_is_known_by_all_its_names() -> None:
    facts = Facts(like=BIG, hosts={"a": HostFacts(SMALL.topology, frozenset({"a.cluster", "10.0.0.1"}))})
    assert facts.of("10.0.0.1") == (facts.hosts["a"], False)
    assert facts.of("b") == (BIG, True)


def test_a_host_of_which_the_job_has_some_cpus_is_assumed_to_give_its_first_ones() -> None:
    known, assumed = Facts(like=SMALL, shares={"b": 1}).of("b")
    assert (str(known.topology.allowed), assumed) == ("0", True)
    assert Facts(like=SMALL, shares={"b": 1}, hosts={"b": SMALL}).of("b") == (SMALL, False)
