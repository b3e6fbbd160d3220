"""The network interface that a host should use: the one that leads to the master."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

# Bridges and tunnels of containers and virtual machines, which lead to no other host.
_VIRTUAL = (
    "docker",
    "br-",
    "virbr",
    "veth",
    "lxc",
    "lxd",
    "cni",
    "flannel",
    "cali",
    "podman",
    "vmnet",
    "vboxnet",
)


@dataclass(frozen=True)
class Interface:
    """A network interface that is up, by one of its addresses; ``prefix`` is the network's length in bits."""

    name: str
    address: str
    prefix: int

    @property
    def network(self) -> str:
        """The network, such as ``10.0.0.0/24``."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))

    @property
    def leads_elsewhere(self) -> bool:
        """Whether it can lead to other hosts; loopback, docker's and other bridges can't."""
        address = ipaddress.ip_address(self.address)
        return not (address.is_loopback or address.is_link_local or self.name.startswith(_VIRTUAL))


def is_loopback(name: str) -> bool:
    """Return whether ``name``, a host name or address, leads each host to itself."""
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name.removeprefix("ip6-").partition(".")[0] == "localhost"


def interface_to_master(
    interfaces: Iterable[Interface], source: str | None, otherwise: Iterable[str | None]
) -> Interface | None:
    """Return the interface among ``interfaces`` that leads to the master; None if none does.

    ``source`` is the address from which this host's kernel would send to the master.  On the master itself,
    it may be a loopback address, even for its own name (Debian's 127.0.1.1).  In that case ``otherwise``
    lists addresses to look for: the master's as other hosts know it, and the one at which ssh reached this
    host.
    """
    usable = [interface for interface in interfaces if interface.leads_elsewhere]
    for wanted in filter(None, (source, *otherwise)):
        for interface in usable:
            if interface.address == wanted:
                return interface
    return None
