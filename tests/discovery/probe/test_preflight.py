"""Problems and warnings that the preflight reports, given the hosts' answers."""

from __future__ import annotations

from typing import Any

import pytest
from support.answers import DOCKER, LO, answer

from cpulaunch.discovery.probe.messages import (
    NO_CPULAUNCH,
    NO_PYTHON,
    ProbeAnswer,
    ProbeRequest,
    ProbeResponse,
)
from cpulaunch.discovery.probe.preflight import (
    MAX_CLOCK_DIFFERENCE,
    HostsNotReadyError,
    demand_ready,
    egress_interface,
    report_on_hosts,
)
from cpulaunch.launchers.reach import Reach, Ssh
from cpulaunch.launchers.srun import SrunReach
from cpulaunch.model.network import Interface
from cpulaunch.wording import PORT_IS_TAKEN

SSH = Ssh()
REQUEST = ProbeRequest(
    python="/venv/bin/python", directory="/home/me", files=["/home/me/train.py"], optional=["/opt/mpi/mpiexec"],
    identical=[], packages=[], libraries=[], master="node0", ports=[0], interface=None, limits={},
)  # fmt: skip


def responses(*answers: ProbeAnswer) -> dict[str, ProbeResponse]:
    return {a.name: ProbeResponse(a, sent=1000.0, received=1001.0) for a in answers}


def complaints(
    given: dict[str, ProbeResponse], request: ProbeRequest = REQUEST, reach: Reach = SSH
) -> list[str]:
    return [
        f"{r.host}: {p.text(r.host)[0]}" for r in report_on_hosts(given, request, reach) for p in r.problems
    ]


def test_the_egress_interface_has_the_address_that_other_hosts_saw() -> None:
    ours = [
        Interface("lo", "127.0.0.1", 8),
        Interface("eth0", "10.0.0.1", 24),
        Interface("ib0", "10.1.0.1", 24),
    ]
    assert egress_interface(responses(answer(0, here=True), answer(1)), ours) == ours[1]
    assert egress_interface(responses(answer(0, here=True)), ours) is None


def test_only_the_first_host_is_blamed_if_it_cannot_reach_itself() -> None:
    hosts = responses(answer(0), answer(1))
    hosts = {name: each._replace(connect_error="Connection refused") for name, each in hosts.items()}
    assert complaints(hosts, REQUEST._replace(master="10.9.9.9")) == [
        "node0: can't connect to 10.9.9.9, where the ranks meet: Connection refused"
    ]


def test_a_single_host_needs_no_interface() -> None:
    assert (
        complaints(responses(answer(0, here=True, interfaces=[LO], master=["127.0.0.1"], source="127.0.0.1")))
        == []
    )


def test_healthy_hosts_have_no_problems() -> None:
    reports = report_on_hosts(responses(answer(0, here=True), answer(1), answer(2)), REQUEST, SSH)
    assert not [r for r in reports if r.problems or r.warnings]
    assert [(r.facts.interface, r.facts.address) for r in reports if r.facts] == [
        ("eth0", f"10.0.0.{n}") for n in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"directory": False}, "there is no directory /home/me"),
        ({"missing": ["/home/me/train.py"]}, "there is no /home/me/train.py"),
        ({"time": 1001.0 + MAX_CLOCK_DIFFERENCE + 1}, "its clock is 31 s ahead of this host's"),
        ({"time": 1000.0 - MAX_CLOCK_DIFFERENCE - 1}, "its clock is 31 s behind this host's"),
        ({"interfaces": [LO, DOCKER]}, "no interface leads to node0; it has docker0, lo"),
        ({"digests": {"/c.so": None}}, "/c.so is not there"),
        ({"digests": {"/c.so": "b"}}, "/c.so is another file than on node0"),
    ],
)
def test_a_host_that_differs_from_the_others_is_a_problem(changes: dict[str, Any], what: str) -> None:
    others = [answer(n, digests={"/c.so": "a"} if "digests" in changes else {}) for n in (0, 2)]
    assert complaints(responses(others[0], answer(1, **changes), others[1])) == [f"node1: {what}"]


def test_the_version_of_most_hosts_counts_as_right() -> None:
    other = {**answer(0).versions, "torch": "2.8.0"}
    assert complaints(responses(answer(0, versions=other), answer(1), answer(2))) == [
        "node0: torch 2.8.0, but 2.13.0 on node1"
    ]
    bare = {**other, "torch": None}
    assert complaints(responses(answer(0), answer(1, versions=bare))) == [
        "node1: torch is not installed, but 2.13.0 on node0"
    ]


@pytest.mark.parametrize(
    ("response", "what"),
    [
        (ProbeResponse(None), "no answer within 7 s"),
        (ProbeResponse(None, NO_PYTHON), "there is no /venv/bin/python"),
        (
            ProbeResponse(None, NO_CPULAUNCH),
            "/venv/bin/python exists, but cpulaunch is not installed at the same path as here",
        ),
        (ProbeResponse(None, 255, "Host key verification failed."), "ssh: Host key verification failed."),
        (
            ProbeResponse(None, 255, "ssh: connect to host node1 port 22: No route to host"),
            "ssh: connect to host node1 port 22: No route to host",
        ),
        (ProbeResponse(None, 255, "kex_exchange: closed"), "ssh: kex_exchange: closed"),
        (ProbeResponse(None, 255), "ssh: ended without a message"),
        (ProbeResponse(None, 0, ""), "its answer is malformed (exit code 0)"),
        (
            ProbeResponse(None, 1, "a\nMemoryError"),
            "its answer is malformed (exit code 1: MemoryError)",
        ),
    ],
)
def test_a_host_without_a_valid_answer_is_reported_with_the_reason(
    response: ProbeResponse, what: str
) -> None:
    assert complaints({**responses(answer(0)), "node1": response}) == [f"node1: {what}"]


@pytest.mark.parametrize(
    ("exit_code", "error", "what"),
    [
        (
            1,
            "srun: error: Unable to create step for job 13: Requested node configuration is not available",
            "srun: Unable to create step for job 13: Requested node configuration is not available",
        ),
        # The last line only reports that the task has ended, so it isn't the cause.
        (
            NO_PYTHON,
            "srun: cluster configuration lacks support for cpu binding\nsrun: error: node1: task 0: Exited with exit code 97",
            "there is no /venv/bin/python",
        ),
        (
            1,
            "MemoryError\nsrun: error: node1: task 0: Exited with exit code 1",
            "its answer is malformed (exit code 1: srun: error: node1: task 0: Exited with exit code 1)",
        ),
    ],
)
def test_a_host_without_a_valid_answer_over_srun_is_reported_with_the_reason(
    exit_code: int, error: str, what: str
) -> None:
    response = ProbeResponse(None, exit_code, error)
    assert complaints({**responses(answer(0)), "node1": response}, reach=SrunReach()) == [f"node1: {what}"]


def test_a_host_that_cannot_reach_the_master_is_reported() -> None:
    hosts = responses(answer(0), answer(1))
    hosts["node1"] = hosts["node1"]._replace(connect_error="Connection refused")
    assert complaints(hosts) == ["node1: can't connect to node0, where the ranks meet: Connection refused"]


def test_a_port_in_use_is_reported_with_its_remedy() -> None:
    hosts = responses(answer(0, listen_error="Address already in use"), answer(1))
    request = REQUEST._replace(ports=[29500])
    assert complaints(hosts, request) == ["node0: port 29500: Address already in use"]
    of_a_range = REQUEST._replace(ports=[29502, 29501, 29500])
    assert complaints(hosts, of_a_range) == ["node0: ports 29500-29502: Address already in use"]
    (report, _) = report_on_hosts(hosts, request, SSH)
    assert report.problems[0].remedy == PORT_IS_TAKEN
    with pytest.raises(HostsNotReadyError) as error:
        demand_ready(report_on_hosts(hosts, request, SSH), print)
    assert error.value.hint is None  # the job would fail without a preflight, too


def test_two_names_of_the_same_host_are_reported() -> None:
    assert complaints(responses(answer(0), answer(1), answer(1, name="alias"))) == [
        "alias: is the same host as node1"
    ]


def test_a_host_that_would_slow_down_the_others_gives_a_warning() -> None:
    facts = {"topology": {"cpus": [[0, 0, 0, 0]]}, "cpu_flags": [], "memory": 1 << 30}
    slow = answer(1, shm=64 << 20, facts=facts)
    report = report_on_hosts(responses(answer(0), slow, answer(2)), REQUEST, SSH)[1]
    assert not report.problems
    assert report.warnings == (
        "/dev/shm holds only 64 MB; DataLoader workers and collectives may need more",
        "has 1 core, but most hosts have 4; the others will wait for it",
        "lacks amx_bf16, unlike most hosts; the others will wait for it",
    )
