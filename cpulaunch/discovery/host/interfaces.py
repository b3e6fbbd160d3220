"""Find a host's network interfaces and routes, and select the interface that each host of a job uses."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cpulaunch.model.network import Interface, interface_to_master, is_loopback

if TYPE_CHECKING:
    from cpulaunch.discovery.probe.messages import ProbeAnswer

_IFF_UP = 1


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interfaces_here() -> list[Interface]:
    """All addresses of this host's active interfaces, from getifaddrs(3).  Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found = []
    try:
        entry = first
        while entry:
            one = entry.contents
            address = _address(one.address)
            if address and one.flags & _IFF_UP:
                mask = _address(one.netmask)
                bits = bin(int(ipaddress.ip_address(mask))).count("1") if mask else 0
                found.append(Interface(one.name.decode(errors="replace"), address, bits))
            entry = one.next
    finally:
        libc.freeifaddrs(first)
    return found


def route_to(master: str) -> tuple[list[str], str | None]:
    """Resolve ``master``, and find this host's own address on the route to it.

    Returns a list of addresses, which is empty for an unknown name, and the own address, or None.
    """
    try:
        found = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return [], None
    addresses = [str(entry[4][0]) for entry in found]
    for family, _, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect(address)  # sends nothing
            return addresses, s.getsockname()[0]
    return addresses, None


def select_interfaces(
    answers: Mapping[str, ProbeAnswer], chosen: str | None = None
) -> dict[str, Interface | None]:
    """Select each host's interface to the master; None if it has none.

    ``answers`` are the hosts' answers, the master's first.  ``chosen`` is the name of the interface that the
    user has chosen, if any.
    """
    others = list(answers.values())[1:]
    resolved = dict.fromkeys(address for answer in others for address in answer.master)
    masters = [address for address in resolved if not is_loopback(address)]
    # This host was not probed by ssh.  Its addresses are those from which the other hosts were probed.
    ours = list(dict.fromkeys(answer.reached_from for answer in answers.values()))
    selected: dict[str, Interface | None] = {}
    for host, answer in answers.items():
        interfaces = [Interface(*row) for row in answer.interfaces]
        if chosen:
            # Prefer IPv4, which most MPIs and providers of libfabric need.
            found = sorted((i for i in interfaces if i.name == chosen), key=lambda i: ":" in i.address)
            selected[host] = found[0] if found else None
        else:
            reached = [answer.reached_at] if answer.reached_at else ours
            selected[host] = interface_to_master(interfaces, answer.source, [*masters, *reached])
    return selected


def _address(sockaddr: int | None) -> str | None:
    """The IP address in a ``struct sockaddr``; None for another family."""
    if not sockaddr:
        return None
    family = ctypes.cast(sockaddr, ctypes.POINTER(ctypes.c_ushort))[0]
    if family == socket.AF_INET:  # family, port, address
        return socket.inet_ntop(family, ctypes.string_at(sockaddr + 4, 4))
    if family == socket.AF_INET6:  # family, port, flow, address, scope
        return socket.inet_ntop(family, ctypes.string_at(sockaddr + 8, 16))
    return None
