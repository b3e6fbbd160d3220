"""This host's interfaces, by getifaddrs(3) as Python itself lists names only, and its route to another."""

from __future__ import annotations

import ctypes
import ipaddress
import socket

from cpulaunch.model.network import Interface

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
    """All addresses of interfaces that are up, in the kernel's order.  Raises OSError."""
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
    """The addresses that the name ``master`` has here, and the one that we would send from to reach it."""
    try:
        found = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return [], None
    for family, _, _, _, address in found:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as s:
                s.connect(address)  # sends nothing
                return [str(entry[4][0]) for entry in found], s.getsockname()[0]
        except OSError:
            continue
    return [str(entry[4][0]) for entry in found], None


def _address(sockaddr: int | None) -> str | None:
    """The IP address in a ``struct sockaddr``; None where it is of another family."""
    if not sockaddr:
        return None
    family = ctypes.cast(sockaddr, ctypes.POINTER(ctypes.c_ushort))[0]
    if family == socket.AF_INET:  # family, port, address
        return socket.inet_ntop(family, ctypes.string_at(sockaddr + 4, 4))
    if family == socket.AF_INET6:  # family, port, flow, address, scope
        return socket.inet_ntop(family, ctypes.string_at(sockaddr + 8, 16))
    return None
