"""This host's interfaces, and which interface each host of a job uses."""

from __future__ import annotations

import pytest
from support.answers import LO, answer

from cpulaunch.discovery.host.interfaces import interfaces_here, select_interfaces
from cpulaunch.discovery.probe.messages import ProbeAnswer
from cpulaunch.model.network import Interface


def chosen(*answers: ProbeAnswer, said: str | None = None) -> list[str | None]:
    return [i.name if i else None for i in select_interfaces({a.name: a for a in answers}, said).values()]


def test_hosts_may_use_interfaces_with_different_names() -> None:
    assert chosen(answer(0), answer(1, interface="ens5"), answer(2)) == ["eth0", "ens5", "eth0"]


@pytest.mark.parametrize(
    "resolved",
    [
        ["127.0.1.1"],  # Debian's line in /etc/hosts for a host's own name
        ["127.0.0.1"],
        [],  # it can't resolve its own name
    ],
)
def test_the_master_may_be_unable_to_resolve_its_own_address(resolved: list[str]) -> None:
    master = answer(0, here=True, master=resolved, source=resolved[0] if resolved else None)
    assert chosen(master, answer(1)) == ["eth0", "eth0"]


def test_a_hostfile_may_begin_with_localhost() -> None:
    """Each host resolves this name to itself, so the addresses of the ssh connections are used instead."""
    hosts = [answer(n, here=n == 0, master=["127.0.0.1"], source="127.0.0.1") for n in range(3)]
    assert chosen(*hosts) == ["eth0"] * 3


def test_an_address_in_dockers_network_is_ignored() -> None:
    misled = answer(1, master=["172.17.0.1"], source="172.17.0.1")
    assert chosen(answer(0), misled) == ["eth0", "eth0"]


def test_the_interface_towards_the_master_is_chosen() -> None:
    interfaces = [LO, ["eno1", "10.0.0.2", 24], ["ib0", "192.168.7.2", 24]]
    fast = answer(1, source="192.168.7.2", interfaces=interfaces)
    assert chosen(answer(0), fast) == ["eth0", "ib0"]


def test_the_users_choice_wins() -> None:
    assert chosen(answer(0), answer(1, interface="ens5"), said="eth0") == ["eth0", None]
    assert chosen(answer(0), said="docker0") == ["docker0"]


def test_the_interfaces_of_this_host_include_loopback() -> None:
    assert Interface("lo", "127.0.0.1", 8) in interfaces_here()
