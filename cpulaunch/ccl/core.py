"""Calls the C API of the core and of the oneCCL module (``csrc/core/interface.h``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import finalize

from cpulaunch.errors import HostError


class _Error(ctypes.Structure):
    _fields_ = (
        ("text", c_void_p),
        ("cause", c_void_p),
        ("has_sequence", c_int),
        ("sequence", c_uint64),
    )


_FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "cl_layout_make": (c_void_p, [c_int32, c_int32, *[POINTER(c_int32)] * 3, POINTER(c_char_p), c_int32,
                                  c_uint64]),
    "cl_layout_free": (None, [c_void_p]),
    "cl_memory_offer": (c_int, [c_void_p]),
    "cl_memory_map": (c_void_p, [c_void_p, c_int, c_int]),
    "cl_slots_free": (None, [c_void_p]),
    "cl_listen_within": (None, [c_int32, c_int32]),
    "cl_listen": (c_int, [c_char_p, POINTER(c_int32), POINTER(_Error)]),
    "cl_own_carrier": (c_void_p, [c_void_p, c_void_p, c_int, c_int32, POINTER(c_char_p), POINTER(c_int32),
                                  c_char_p, c_size_t, c_void_p, c_int32, POINTER(_Error)]),
    "cl_carrier_free": (None, [c_void_p]),
    "cl_endpoint_open": (c_void_p, [c_char_p, c_char_p, POINTER(_Error)]),
    "cl_endpoint_free": (None, [c_void_p]),
    "cl_endpoint_name": (c_void_p, [c_void_p, POINTER(c_size_t)]),
    "cl_endpoint_know": (None, [c_void_p, POINTER(c_char_p), POINTER(c_size_t), c_int32, POINTER(_Error)]),
    "cl_moved": (None, [POINTER(c_uint64)] * 2),
}  # fmt: skip
_ONECCL_FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "cl_oneccl_carrier": (c_void_p, [c_void_p]),
}


@dataclass(frozen=True)
class Layout:
    """The hosts and sockets of a group's ranks, and the ranks' names in messages.  Sequences are by rank."""

    rank: int  # this rank
    host_of: Sequence[int]  # index of the host
    socket_of: Sequence[int]  # its group within the host (`levels.groups_of`), or -1
    numbers: Sequence[int]  # rank in the job
    host_names: Sequence[str] = field(default=())  # empty if there is one host
    threads: int = 1  # minimum number of threads with which a rank computes
    cache: int = 0  # this rank's share of the last-level cache in bytes

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.host_of)

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return len(set(self.host_of))

    @property
    def locals(self) -> list[int]:
        """The ranks on the host of ``rank``."""
        return [rank for rank, host in enumerate(self.host_of) if host == self.host_of[self.rank]]


class Handle:
    """Owns an object of the core, and frees it when the handle is deleted."""

    def __init__(self, address: int, free: Callable[[int], None]) -> None:
        self.address = address
        self._free = finalize(self, free, address)

    def taken(self) -> int:
        """Return the address, and leave it to the caller to free the object."""
        self._free.detach()
        return self.address


@dataclass(frozen=True)
class Carrier:
    """The transport of a group's collectives, before its ranks are connected."""

    handle: Handle
    has_messages: bool  # supports send and recv


@dataclass(frozen=True)
class Endpoint:
    """This rank's endpoint of libfabric."""

    handle: Handle
    name: bytes  # the address for other ranks


class Core:
    """The loaded core.  Raises HostError if it does not load."""

    def __init__(self, path: Path) -> None:
        self._c = _load(path, _FUNCTIONS)

    def offer_memory(self, layout: Layout) -> int:
        """Return a descriptor of new shared memory for the ranks of this host; -1 if none is available.

        Keep it open until all ranks have mapped the memory.
        """
        its = self._layout(layout)
        return int(self._c.cl_memory_offer(its.address))

    def map_memory(self, layout: Layout, *, pid: int, descriptor: int) -> Handle | None:
        """Map the memory that the process ``pid`` offers; None if this process may not open it."""
        its = self._layout(layout)
        slots = self._c.cl_memory_map(its.address, pid, descriptor)
        return Handle(slots, self._c.cl_slots_free) if slots else None

    def listen_within(self, ports: range) -> None:
        """Restrict the ports on which this process listens."""
        self._c.cl_listen_within(ports[0], ports[-1])

    def listen(self, ip: str) -> tuple[int, int]:
        """Listen for ranks of other hosts, and return the socket's descriptor and port.

        Raises HostError if ``ip`` is not an address of this host, or if no port is free.
        """
        port = c_int32()
        descriptor = self._call("cl_listen", ip.encode(), byref(port))
        return int(descriptor), port.value

    def open_endpoint(self, library: str, ip: str) -> Endpoint:
        """Open an endpoint of libfabric.  ``library`` is libfabric's path or name.

        ``ip`` is an address of this host, or empty to let the provider choose one.  Raises HostError if the
        library does not load, or has no provider for this host.
        """
        address = self._call("cl_endpoint_open", library.encode(), ip.encode())
        size = c_size_t()
        name = self._c.cl_endpoint_name(address, byref(size))
        return Endpoint(Handle(address, self._c.cl_endpoint_free), ctypes.string_at(name, size.value))

    def own_carrier(
        self,
        layout: Layout,
        slots: Handle | None,
        *,
        listener: tuple[int, int] | None = None,
        addresses: Sequence[tuple[str, int]] = (),
        key: bytes = b"",
        endpoint: Endpoint | None = None,
        names: Sequence[bytes] = (),
        connections: int = 1,
    ) -> Carrier:
        """Return cpulaunch's own transport.

        ``slots`` is shared memory, or None if this rank is alone on its host.  ``listener`` is from `listen`,
        or None if there is one host.  ``addresses`` has each rank's (ip, port).  ``key`` is the group's
        secret.  If ``endpoint`` is given, libfabric carries collectives between hosts instead of TCP, and
        ``names`` are the endpoints' names of all ranks.  ``connections``: the number of TCP connections that
        carry collectives to each rank of another host.
        """
        if endpoint:
            sizes = (c_size_t * len(names))(*[len(name) for name in names])
            texts = (c_char_p * len(names))(*names)
            self._call("cl_endpoint_know", endpoint.handle.address, texts, sizes, len(names))
        descriptor, port = listener or (-1, 0)
        ips = _texts([ip for ip, _ in addresses])
        its = self._layout(layout)
        address = self._call(
            "cl_own_carrier", its.address, _address(slots), descriptor, port, ips,
            _numbers([port for _, port in addresses]), key, len(key),
            endpoint.handle.address if endpoint else None, connections,
        )  # fmt: skip
        return Carrier(Handle(address, self._c.cl_carrier_free), has_messages=True)

    def oneccl_carrier(self, path: Path, layout: Layout) -> Carrier:
        """Return oneCCL as the transport, from the module ``path``.  Raises HostError if it does not load."""
        its = self._layout(layout)
        made = _load(path, _ONECCL_FUNCTIONS).cl_oneccl_carrier(its.address)
        return Carrier(Handle(made, self._c.cl_carrier_free), has_messages=False)

    def moved_by_this_thread(self) -> tuple[int, int]:
        """Return how many bytes the calling thread has copied so far, and how many it has summed."""
        copied, summed = c_uint64(), c_uint64()
        self._c.cl_moved(byref(copied), byref(summed))
        return copied.value, summed.value

    def _layout(self, layout: Layout) -> Handle:  # its address is valid while the handle exists
        names = _texts(layout.host_names) if layout.host_names else None
        made = self._c.cl_layout_make(
            layout.size, layout.rank, _numbers(layout.host_of), _numbers(layout.socket_of),
            _numbers(layout.numbers), names, layout.threads, layout.cache,
        )  # fmt: skip
        return Handle(made, self._c.cl_layout_free)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the core with an error as its last argument.  Raises HostError if it is set."""
        error = _Error()
        result = getattr(self._c, name)(*arguments, byref(error))
        if not error.text:
            return result
        text = ctypes.string_at(error.text).decode(errors="replace")
        libc = ctypes.CDLL(None)
        libc.free(c_void_p(error.text))
        raise HostError(text)


def _load(path: Path, functions: dict[str, tuple[Any, Sequence[Any]]]) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise HostError(
            f"the ccl process group does not load: {error}",
            hint="Build it again: `cpulaunch ccl build --force`.",
        ) from error
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library


def _address(handle: Handle | None) -> int | None:
    return handle.address if handle else None


def _numbers(numbers: Sequence[int]) -> Any:
    return (c_int32 * len(numbers))(*numbers)


def _texts(texts: Sequence[str]) -> Any:
    return (c_char_p * len(texts))(*[text.encode() for text in texts])
