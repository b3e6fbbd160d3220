"""Network interfaces as values, and the interface that leads to the master."""

from __future__ import annotations

from cpulaunch.model.network import Interface, interface_to_master


def test_loopback_and_bridges_are_never_chosen() -> None:
    only = [
        Interface("lo", "127.0.0.1", 8),
        Interface("docker0", "172.17.0.1", 16),
        Interface("e", "fe80::1", 64),
    ]
    assert interface_to_master(only, "127.0.0.1", ["172.17.0.1", "fe80::1"]) is None


def test_an_interface_knows_its_network() -> None:
    assert Interface("eth0", "10.1.2.3", 20).network == "10.1.0.0/20"
