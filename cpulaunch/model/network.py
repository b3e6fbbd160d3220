"""Which network interface a host should use: the one that leads to the master."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Bridges and tunnels of containers and virtual machines: they lead to no other host.
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
        """Such as ``10.0.0.0/24``."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))

    @property
    def leads_elsewhere(self) -> bool:
        """Whether other hosts can be behind it: not so for loopback, nor for docker's and other bridges."""
        address = ipaddress.ip_address(self.address)
        return not (address.is_loopback or address.is_link_local or self.name.startswith(_VIRTUAL))


def interface_to_master(
    interfaces: Iterable[Interface], source: str | None, otherwise: Iterable[str | None]
) -> Interface | None:
    """The one of a host's ``interfaces`` that leads to the master; None where none does.

    ``source`` is the address that this host's kernel would send from to reach the master.  On the master
    itself that may be a loopback address, even for its own name (Debian's 127.0.1.1).  ``otherwise`` are
    addresses to look for then: the master's as other hosts know it, and that at which ssh reached this one.
    """
    usable = [interface for interface in interfaces if interface.leads_elsewhere]
    for wanted in filter(None, (source, *otherwise)):
        for interface in usable:
            if interface.address == wanted:
                return interface
    return None


def wire(answers: Sequence[Mapping[str, Any]], said: str | None = None) -> list[Interface | None]:
    """The interface of each host that answered, the master first; None where no interface leads to it.

    ``answers`` are those of ``probe_there``.  ``said`` is the name of an interface that the user chose.
    """
    seen = dict.fromkeys(a for answer in answers[1:] for a in answer.get("master", ()))
    masters = [address for address in seen if not _is_loopback(address)]
    # The host that we are on was reached without ssh: the others know it by where we came from.
    ours = list(dict.fromkeys(answer["reached_from"] for answer in answers))
    chosen = []
    for answer in answers:
        interfaces = [Interface(*row) for row in answer["interfaces"]]
        if said:
            # IPv4 first, as that is what most of MPI and libfabric wants.
            found = sorted((i for i in interfaces if i.name == said), key=lambda i: ":" in i.address)
            chosen.append(found[0] if found else None)
        else:
            reached = [answer["reached_at"]] if answer["reached_at"] else ours
            chosen.append(interface_to_master(interfaces, answer.get("source"), [*masters, *reached]))
    return chosen


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
