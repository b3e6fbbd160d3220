"""Facts about hosts: how they are recorded and looked up."""

from __future__ import annotations

from dataclasses import replace

from support.plans import BIG, SMALL

from cpulaunch.model.facts import Facts, HostFacts, read_record, record


def test_a_recorded_host_is_known_by_all_its_names() -> None:
    facts = Facts(like=BIG, hosts={"a": HostFacts(SMALL.topology, frozenset({"a.cluster", "10.0.0.1"}))})
    assert facts.of("10.0.0.1") == (facts.hosts["a"], False)
    assert facts.of("b") == (BIG, True)


def test_recorded_facts_round_trip() -> None:
    hosts = {"a": replace(SMALL, libc="glibc 2.36", memory_limit=16 << 30), "b": BIG}
    assert read_record(record(hosts), "facts.json") == hosts


def test_an_older_record_lacks_the_c_library_and_the_memory_limit() -> None:
    older = {key: value for key, value in SMALL.to_json().items() if key not in ("libc", "memory_limit")}
    assert HostFacts.from_json(older) == SMALL


def test_a_job_with_some_cpus_of_a_host_is_assumed_to_have_the_hosts_first_cpus() -> None:
    known, assumed = Facts(like=SMALL, shares={"b": 1}).of("b")
    assert (str(known.topology.allowed), assumed) == ("0", True)
    assert Facts(like=SMALL, shares={"b": 1}, hosts={"b": SMALL}).of("b") == (SMALL, False)
