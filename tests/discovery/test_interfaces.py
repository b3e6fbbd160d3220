"""Which interface leads to the master, and what is said of hosts that answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpulaunch.discovery.interfaces import interfaces_here, select_interfaces
from cpulaunch.discovery.preflight import MAX_CLOCK_DIFFERENCE, egress_interface, report_on_hosts
from cpulaunch.discovery.probe_messages import NO_CPULAUNCH, NO_PYTHON, ProbeRequest, ProbeResponse
from cpulaunch.model.network import Interface, interface_to_master

REQUEST = ProbeRequest("/venv/bin/python", "/home/me", ("/home/me/train.py",), master="node0")

LO = ["lo", "127.0.0.1", 8]
DOCKER = ["docker0", "172.17.0.1", 16]


def answer(number: int, *, interface: str = "eth0", here: bool = False, **changes: Any) -> dict[str, Any]:
    """What host number ``number`` of a sound cluster answers."""
    return {
        "name": f"node{number}",
        "time": 1000.5,
        "versions": {
            "Python": "3.12.1",
            "cpulaunch": "0.1.0",
            "torch": "2.13.0",
            "intel_extension_for_pytorch": None,
        },
        "digests": {},
        "directory": True,
        "missing": [],
        "shm": 1 << 33,
        "reached_at": None if here else f"10.0.0.{number + 1}",
        "reached_from": None if here else "10.0.0.1",
        "interfaces": [LO, DOCKER, [interface, f"10.0.0.{number + 1}", 24]],
        "master": ["10.0.0.1"],
        "source": f"10.0.0.{number + 1}",
        "facts": {
            "topology": {"cpus": [[n, n, 0, 0] for n in range(4)]},
            "cpu_flags": ["amx_bf16"],
            "memory": 1 << 36,
        },
        **changes,
    }


def responses(*answers: dict[str, Any]) -> dict[str, ProbeResponse]:
    return {a["name"]: ProbeResponse(a, sent=1000.0, received=1001.0) for a in answers}


def complaints(given: dict[str, ProbeResponse], request: ProbeRequest = REQUEST) -> list[str]:
    return [f"{r.host}: {p.what}" for r in report_on_hosts(given, request) for p in r.problems]


def chosen(*answers: dict[str, Any], said: str | None = None) -> list[str | None]:
    return [i.name if i else None for i in select_interfaces({a["name"]: a for a in answers}, said).values()]


def test_each_host_has_its_own_interface() -> None:
    assert chosen(answer(0), answer(1, interface="ens5"), answer(2)) == ["eth0", "ens5", "eth0"]


@pytest.mark.parametrize(
    "resolved",
    [
        ["127.0.1.1"],  # Debian's line in /etc/hosts for a host's own name
        ["127.0.0.1"],
        [],  # its own name means nothing to it
    ],
)
def test_the_master_need_not_know_its_own_address(resolved: list[str]) -> None:
    master = answer(0, here=True, master=resolved, source=resolved[0] if resolved else None)
    assert chosen(master, answer(1)) == ["eth0", "eth0"]


def test_a_hostfile_that_begins_with_localhost() -> None:
    """To every host that name means itself, so what counts is where ssh came from."""
    hosts = [answer(n, here=n == 0, master=["127.0.0.1"], source="127.0.0.1") for n in range(3)]
    assert chosen(*hosts) == ["eth0"] * 3


def test_a_master_name_that_leads_into_dockers_network() -> None:
    misled = answer(1, master=["172.17.0.1"], source="172.17.0.1")
    assert chosen(answer(0), misled) == ["eth0", "eth0"]


def test_of_two_networks_the_one_to_the_master() -> None:
    fast = answer(1, source="192.168.7.2")
    fast["interfaces"] = [LO, ["eno1", "10.0.0.2", 24], ["ib0", "192.168.7.2", 24]]
    assert chosen(answer(0), fast) == ["eth0", "ib0"]


def test_what_the_user_said_wins() -> None:
    assert chosen(answer(0), answer(1, interface="ens5"), said="eth0") == ["eth0", None]
    assert chosen(answer(0), said="docker0") == ["docker0"]


def test_loopback_and_bridges_never_win() -> None:
    only = [
        Interface("lo", "127.0.0.1", 8),
        Interface("docker0", "172.17.0.1", 16),
        Interface("e", "fe80::1", 64),
    ]
    assert interface_to_master(only, "127.0.0.1", ["172.17.0.1", "fe80::1"]) is None


def test_an_interface_knows_its_network() -> None:
    assert Interface("eth0", "10.1.2.3", 20).network == "10.1.0.0/20"


def test_this_host_has_loopback() -> None:
    assert Interface("lo", "127.0.0.1", 8) in interfaces_here()


def test_the_egress_interface_is_where_the_others_saw_us() -> None:
    ours = [
        Interface("lo", "127.0.0.1", 8),
        Interface("eth0", "10.0.0.1", 24),
        Interface("ib0", "10.1.0.1", 24),
    ]
    assert egress_interface(responses(answer(0, here=True), answer(1)), ours) == ours[1]
    assert egress_interface(responses(answer(0, here=True)), ours) is None


def test_one_host_alone_needs_no_interface() -> None:
    assert (
        complaints(responses(answer(0, here=True, interfaces=[LO], master=["127.0.0.1"], source="127.0.0.1")))
        == []
    )


def test_sound_hosts_have_no_problems() -> None:
    reports = report_on_hosts(responses(answer(0, here=True), answer(1), answer(2)), REQUEST)
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
def test_one_host_is_wrong(changes: dict[str, Any], what: str) -> None:
    others = [answer(n, digests={"/c.so": "a"} if "digests" in changes else {}) for n in (0, 2)]
    assert complaints(responses(others[0], answer(1, **changes), others[1])) == [f"node1: {what}"]


def test_the_majority_has_the_right_version() -> None:
    other = {**answer(0)["versions"], "torch": "2.8.0"}
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
            "/venv/bin/python is there, but cpulaunch isn't where it is here",
        ),
        (ProbeResponse(None, 255, "Host key verification failed."), "ssh: Host key verification failed."),
        (
            ProbeResponse(None, 255, "ssh: connect to host node1 port 22: No route to host"),
            "ssh: connect to host node1 port 22: No route to host",
        ),
        (ProbeResponse(None, 255, "kex_exchange: closed"), "ssh: kex_exchange: closed"),
        (ProbeResponse(None, 255), "ssh: ended without a word"),
        (ProbeResponse(None, 0, ""), "its answer was not understood (exit code 0)"),
        (
            ProbeResponse(None, 1, "a\nMemoryError"),
            "its answer was not understood (exit code 1: MemoryError)",
        ),
    ],
)
def test_a_host_that_gives_no_answer(response: ProbeResponse, what: str) -> None:
    assert complaints({**responses(answer(0)), "node1": response}) == [f"node1: {what}"]


def test_a_host_that_does_not_reach_the_master() -> None:
    hosts = responses(answer(0), answer(1))
    hosts["node1"] = replace(hosts["node1"], connect_error="Connection refused")
    assert complaints(hosts) == ["node1: can't connect to node0, where the ranks meet: Connection refused"]


def test_a_port_that_is_taken() -> None:
    hosts = responses(answer(0, listen_error="Address already in use"), answer(1))
    assert complaints(hosts, replace(REQUEST, port=29500)) == ["node0: port 29500: Address already in use"]


def test_two_names_of_one_host() -> None:
    twin = {**answer(1), "name": "alias"}
    assert complaints(responses(answer(0), answer(1), twin)) == ["alias: is the same host as node1"]


def test_what_will_slow_the_others_down_is_a_warning() -> None:
    slow = answer(1, shm=64 << 20)
    slow["facts"] = {"topology": {"cpus": [[0, 0, 0, 0]]}, "cpu_flags": [], "memory": 1 << 30}
    report = report_on_hosts(responses(answer(0), slow, answer(2)), REQUEST)[1]
    assert not report.problems
    assert report.warnings == (
        "/dev/shm holds only 64 MB; DataLoader workers and collectives may need more",
        "has 1 of the 4 cores that most have; the others will wait for it",
        "lacks amx_bf16, which most have; the others will wait for it",
    )
