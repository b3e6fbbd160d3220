"""Exchanges data between the ranks of a new group through torch's store.

Rank 0 collects all ranks' data and publishes them as one value.  So each rank makes a fixed number of
requests, and the store, which has one thread, answers O(N) requests for N ranks.
"""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import distributed

from cpulaunch.ccl.levels import CPUS, Parts, groups_of
from cpulaunch.errors import ConfigError, HostError
from cpulaunch.model.cores import CoreSet

_MAX_DATA = 1 << 16
"""Maximum bytes of one rank's data; 8,000 CPUs take less."""

_SAME_BOOT = 0.005
"""Maximum seconds by which ranks' estimates of one machine's boot time differ."""

_MOST_CACHE = 4 << 20
"""Maximum bytes of last-level cache per CPU: that of a 16-core EPYC with 64 MB."""

_NAMED = 20
"""Maximum number of missing ranks that a message names."""


class Peer(NamedTuple):
    """What a rank reports about itself to the others."""

    host: str  # the same for ranks that can access each other's processes and shared memory
    pid: int
    cpus: list[int]
    parts: Parts  # of its machine
    booted: float = 0.0  # the machine's boot time in seconds; containers of one machine have the same
    threads: int = 1  # with which it computes

    @classmethod
    def this_process(cls) -> Peer:
        """Return this rank's own data."""
        cpus = sorted(os.sched_getaffinity(0))
        return cls(_host(), os.getpid(), cpus, Parts.of(cpus), _booted(), torch.get_num_threads())


def shares_cores(rank: int, peers: Sequence[Peer]) -> bool:
    """Return whether ranks in other containers of ``rank``'s machine may run on its cores.

    `cores_of` counts ranks on its own host.
    """
    own = peers[rank]
    others = (peer for peer in peers if peer.host != own.host)
    beside = (peer for peer in others if abs(peer.booted - own.booted) < _SAME_BOOT)
    return any(set(peer.cpus) & set(own.cpus) for peer in beside)


def cores_of(own: Peer, peers: Iterable[Peer]) -> int:
    """Return the CPUs per rank if the ranks of ``own``'s host share CPUs evenly; 0 if CPUs are too few."""
    beside = [peer for peer in peers if peer.host == own.host and set(peer.cpus) & set(own.cpus)]
    within = [peer for peer in beside if set(peer.cpus) <= set(own.cpus)]
    return min(len({cpu for each in ranks for cpu in each.cpus}) // len(ranks) for ranks in (beside, within))


def threads_of_each(peers: Sequence[Peer]) -> int:
    """Return the number of threads that every rank has, at most one for each CPU of a rank."""
    of_host: dict[str, list[Peer]] = {}
    for peer in peers:
        of_host.setdefault(peer.host, []).append(peer)
    cpus = min(len({cpu for each in here for cpu in each.cpus}) // len(here) for here in of_host.values())
    return max(1, min(cpus, *(peer.threads for peer in peers)))


def groups_of_host(rank: int, peers: Sequence[Peer]) -> list[int]:
    """Return the group of each rank of ``rank``'s host, by `groups_of`; -1 for ranks of other hosts."""
    here = [number for number, peer in enumerate(peers) if peer.host == peers[rank].host]
    groups = dict(zip(here, groups_of([peers[number].parts for number in here]), strict=True))
    return [groups.get(number, -1) for number in range(len(peers))]


class Meeting:
    """The rendezvous of a new group's ranks.

    ``numbers`` are the ranks' numbers in the job.  Raises torch's DistBackendError if ``rank`` is not less
    than the size of the group.
    """

    def __init__(self, store: Any, rank: int, numbers: Sequence[int], timeout: timedelta) -> None:
        size = len(numbers)
        if not 0 <= rank < size:
            raise distributed.DistBackendError(
                f"ccl: this is rank {rank}, but the group has {size} ranks, numbered from 0: RANK is too "
                "large, or WORLD_SIZE too small"
            )
        self.rank, self.size, self.numbers = rank, size, numbers
        self._store, self._timeout = store, timeout
        self._names: list[str] = []

    def exchange(self, name: str, mine: Any) -> list[Any]:
        """Send this rank's data, ``mine``, and return all ranks' data by rank.  Data must be valid in JSON.

        Raises torch's DistBackendError if ranks are missing after the timeout.
        """
        self._names.append(name)
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(mine))
        try:
            if self.rank == 0:
                self._store.wait(keys, self._timeout)
                data = b"[" + b",".join(self._store.multi_get(keys)) + b"]"
                self._store.set(name, zlib.compress(data, level=1))
                self._delete(keys)
            else:
                self._store.wait([name], self._timeout)
        except RuntimeError as error:
            raise self._missing(keys) from error
        return self._unpacked(self._store.get(name))

    def _unpacked(self, packed: bytes) -> list[Any]:
        """Unpack all ranks' data.  Its size is limited, since strangers may write to the store."""
        unpacking = zlib.decompressobj()
        try:
            text = unpacking.decompress(packed, self.size * _MAX_DATA)
            every = json.loads(text) if unpacking.eof else None
        except (zlib.error, ValueError, RecursionError):
            every = None
        if not isinstance(every, list) or len(every) != self.size:
            raise distributed.DistBackendError("ccl: the store has malformed data for this group")
        return every

    def end(self) -> None:
        """Remove the group's keys from the store once all ranks have read them."""
        with suppress(RuntimeError):  # the rank that holds the store has ended
            if self._store.add("read", 1) == self.size:
                self._delete([*self._names, "read"])

    def _delete(self, keys: list[str]) -> None:
        with suppress(RuntimeError):  # not every store supports deletion
            for key in keys:
                self._store.delete_key(key)

    def _missing(self, keys: list[str]) -> Exception:
        absent = zip(self.numbers, keys, strict=True)
        try:
            missing = [str(number) for number, key in absent if not self._store.check([key])]
        except RuntimeError:
            return distributed.DistBackendError(
                "ccl: the ranks' store cannot be reached while they make a group: the process that keeps it, "
                "usually rank 0, has ended, or has destroyed its default group"
            )
        seconds = self._timeout.total_seconds()
        return distributed.DistBackendError(
            f"ccl: {len(missing)} of {self.size} ranks did not join within {seconds:g} s: "
            f"{', '.join(missing[:_NAMED])}"
        )


def own_address(variables: dict[str, str], local_rank: int = 0) -> str:
    """Return an address of this host for other hosts.

    It is the address of the interface in GLOO_SOCKET_IFNAME, FI_TCP_IFACE or CCL_KVS_IFACE, else the source
    address of packets to the master.  If a variable names several interfaces, the host's ranks use them in
    turn.  Raises HostError if there is no address.
    """
    for name in ("GLOO_SOCKET_IFNAME", "FI_TCP_IFACE", "CCL_KVS_IFACE"):
        if interfaces := [each for each in variables.get(name, "").split(",") if each]:
            return _address_of(interfaces[local_rank % len(interfaces)], name)
    master = variables.get("MASTER_ADDR", "localhost")
    address = _source_address(master)
    if not address.startswith("127.") or master in ("localhost", address):
        return address
    # On the master's own host, its name often resolves to a loopback address.
    for interface, status in psutil.net_if_stats().items():
        if status.isup and "loopback" not in status.flags:
            with suppress(HostError):
                return _address_of(interface, "")
    raise HostError(
        "no network interface of this host leads to the other hosts: name one in GLOO_SOCKET_IFNAME"
    )


def _address_of(interface: str, variable: str) -> str:
    found = [
        (each.family, each.address)
        for each in psutil.net_if_addrs().get(interface, [])
        if "%" not in each.address  # a link-local address is valid on this host only
    ]
    for wanted in (socket.AF_INET, socket.AF_INET6):
        for family, address in found:
            if family == wanted:
                return address
    raise HostError(f"{variable} names the interface {interface!r}, which has no address on this host")


def _source_address(master: str) -> str:
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HostError(f"the master's address {master} can't be reached from this host: {error}") from error


def cache_of(cpus: Sequence[int], root: Path = CPUS) -> int:
    """Return the bytes of last-level cache that ``cpus`` have if CPUs share a cache evenly; 0 if unknown.

    A virtual machine with few CPUs may show its host's whole cache, so each CPU counts at most `_MOST_CACHE`.
    """
    total = 0.0
    for cpu in cpus:
        cache = root / f"cpu{cpu}/cache/index3"
        try:
            size, shared = (cache / "size").read_text(), (cache / "shared_cpu_list").read_text()
            total += min(int(size.strip().removesuffix("K")) * 1024 / len(CoreSet.parse(shared)), _MOST_CACHE)
        except (OSError, ValueError, ZeroDivisionError, ConfigError):
            return 0
    return int(total)


def _booted() -> float:
    """Return the machine's boot time in seconds.

    Containers of one machine may have different boot ids, but they have the same clocks.  Of several
    readings, the one that took the least time is the most accurate.
    """
    tries = []
    for _ in range(5):
        before, now, after = (
            time.clock_gettime(time.CLOCK_BOOTTIME),
            time.time(),
            time.clock_gettime(time.CLOCK_BOOTTIME),
        )
        tries.append((after - before, now - before))
    return round(min(tries)[1], 4)


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{socket.gethostname()} {boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
