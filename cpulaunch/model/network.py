"""Network interfaces, and the choice of the interface that leads to the master."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

# Prefixes of bridges and tunnels of containers and virtual machines, which lead to no other host.
_VIRTUAL = (
    "docker", "br-", "virbr", "veth", "lxc", "lxd", "cni", "flannel", "cali", "podman", "vmnet", "vboxnet",
)  # fmt: skip


@dataclass(frozen=True)
class Interface:
    """A network interface that is up, and one of its addresses; ``prefix`` is the prefix length in bits."""

    name: str
    address: str
    prefix: int

    @property
    def network(self) -> str:
        """The network, such as ``10.0.0.0/24``."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))

    @property
    def leads_elsewhere(self) -> bool:
        """Whether it can lead to other hosts, unlike loopback and the bridges of containers."""
        address = ipaddress.ip_address(self.address)
        return not (address.is_loopback or address.is_link_local or self.name.startswith(_VIRTUAL))


def is_loopback(name: str) -> bool:
    """Return whether a host name or address is that of the loopback interface."""
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name.removeprefix("ip6-").partition(".")[0] == "localhost"


def interface_to_master(
    interfaces: Iterable[Interface], source: str | None, otherwise: Iterable[str | None]
) -> Interface | None:
    """Return the interface that leads to the master; None if there is none among ``interfaces``.

    ``source`` is the address from which this host's kernel would send to the master.  On the master itself,
    it may be a loopback address (Debian resolves a host's own name to 127.0.1.1).  ``otherwise`` lists
    further addresses to search for: the master's address on other hosts, and the address at which ssh reached
    this host.
    """
    usable = [interface for interface in interfaces if interface.leads_elsewhere]
    for wanted in filter(None, (source, *otherwise)):
        for interface in usable:
            if interface.address == wanted:
                return interface
    return None
