"""How the ranks of a new group learn of each other, through torch's store.

Each rank makes the same number of requests, however many ranks there are: rank 0 collects what all have to
say, and publishes it as one value.  So the store's one thread answers O(N) requests for N ranks.
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

from cpulaunch.errors import ConfigError, HostError
from cpulaunch.model.cores import CoreSet

_MAX_SAID = 1 << 16
"""Bytes that a rank may say: 8,000 CPUs take less."""

_SAME_BOOT = 0.005
"""Seconds between what ranks of one machine make of its boot, which the clock's adjustments change."""

_MOST_CACHE = 4 << 20
"""Bytes of the last cache for a CPU: those of an EPYC of 16 cores with 64 MB."""

_NAMED = 20
"""The most missing ranks that a message names."""


class Peer(NamedTuple):
    """What a rank tells the others about itself."""

    host: str  # the same for ranks that see each other's processes and shared memory
    pid: int
    cpus: list[int]
    socket: int  # -1: on several, or unknown
    booted: float = 0.0  # when the machine was, in seconds; hosts that are simulated on one have the same
    threads: int = 1  # with which it computes

    @classmethod
    def this_process(cls) -> Peer:
        """This rank's own."""
        cpus = sorted(os.sched_getaffinity(0))
        return cls(_host(), os.getpid(), cpus, _socket(cpus), _booted(), torch.get_num_threads())


def shares_cores(rank: int, peers: Sequence[Peer]) -> bool:
    """Whether ranks of other hosts that are simulated on ``rank``'s machine may run on its cores.

    Whether those of its own host do is known otherwise.
    """
    own = peers[rank]
    others = (peer for peer in peers if peer.host != own.host)
    beside = (peer for peer in others if abs(peer.booted - own.booted) < _SAME_BOOT)
    return any(set(peer.cpus) & set(own.cpus) for peer in beside)


def is_crowded(own: Peer, peers: Iterable[Peer]) -> bool:
    """Whether more ranks of ``own``'s host than there are CPUs run on those that it may use."""
    beside = [peer for peer in peers if peer.host == own.host and set(peer.cpus) & set(own.cpus)]
    within = [peer for peer in beside if set(peer.cpus) <= set(own.cpus)]
    return any(len(ranks) > len({cpu for each in ranks for cpu in each.cpus}) for ranks in (beside, within))


def threads_of_each(peers: Sequence[Peer]) -> int:
    """With how many threads each rank computes, or more, where each of them has a CPU to itself."""
    of_host: dict[str, list[Peer]] = {}
    for peer in peers:
        of_host.setdefault(peer.host, []).append(peer)
    cpus = min(len({cpu for each in here for cpu in each.cpus}) // len(here) for here in of_host.values())
    return max(1, min(cpus, *(peer.threads for peer in peers)))


class Meeting:
    """One group's ranks, while it is made.

    ``numbers`` are those of its ranks in the job.  Raises torch's DistBackendError where this rank can't be
    one of them.
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
        """What all ranks say, in their order; ``mine`` is what this one says, as JSON can hold it.

        Raises torch's DistBackendError where some don't come in time.
        """
        self._names.append(name)
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(mine))
        try:
            if self.rank == 0:
                self._store.wait(keys, self._timeout)
                said = b"[" + b",".join(self._store.multi_get(keys)) + b"]"
                self._store.set(name, zlib.compress(said, level=1))
                self._delete(keys)
            else:
                self._store.wait([name], self._timeout)
        except RuntimeError as error:
            raise self._missing(keys) from error
        return self._unpacked(self._store.get(name))

    def _unpacked(self, packed: bytes) -> list[Any]:
        """Whoever reaches the store can write there: no more is unpacked than ranks can have said."""
        unpacking = zlib.decompressobj()
        try:
            text = unpacking.decompress(packed, self.size * _MAX_SAID)
            every = json.loads(text) if unpacking.eof else None
        except (zlib.error, ValueError, RecursionError):
            every = None
        if not isinstance(every, list) or len(every) != self.size:
            raise distributed.DistBackendError("ccl: the store holds something that ranks don't write")
        return every

    def end(self) -> None:
        """Leave nothing in the store: the last one deletes what all have read.

        A store that has gone, as the rank that had it needs it no more, has nothing left.
        """
        with suppress(RuntimeError):
            if self._store.add("read", 1) == self.size:
                self._delete([*self._names, "read"])

    def _delete(self, keys: list[str]) -> None:
        with suppress(RuntimeError):  # not every store can
            for key in keys:
                self._store.delete_key(key)

    def _missing(self, keys: list[str]) -> Exception:
        absent = zip(self.numbers, keys, strict=True)
        try:
            missing = [str(number) for number, key in absent if not self._store.check([key])]
        except RuntimeError:
            return distributed.DistBackendError(
                "ccl: the ranks' store cannot be reached while they make a group: the process that holds it, "
                "usually rank 0, has ended, or has destroyed the group that it was made for"
            )
        seconds = self._timeout.total_seconds()
        return distributed.DistBackendError(
            f"ccl: {len(missing)} of {self.size} ranks did not come within {seconds:g} s: "
            f"{', '.join(missing[:_NAMED])}"
        )


def own_address(variables: dict[str, str], local_rank: int = 0) -> str:
    """This host's address for the other hosts: of the interface that is named, else on the way to the master.

    Where several are named, the host's ranks take them in turn.  Raises HostError where there is none.
    """
    for name in ("GLOO_SOCKET_IFNAME", "FI_TCP_IFACE", "CCL_KVS_IFACE"):
        if interfaces := [each for each in variables.get(name, "").split(",") if each]:
            return _address_of(interfaces[local_rank % len(interfaces)], name)
    master = variables.get("MASTER_ADDR", "localhost")
    address = _source_address(master)
    if not address.startswith("127.") or master in ("localhost", address):
        return address
    # On the master's own host, its name often stands for a loopback address.
    for interface, status in psutil.net_if_stats().items():
        if status.isup and "loopback" not in status.flags:
            with suppress(HostError):
                return _address_of(interface, "")
    raise HostError(
        "no network interface of this host leads to the other hosts: name one in GLOO_SOCKET_IFNAME"
    )


def _address_of(interface: str, variable: str) -> str:
    found = {each.family: each.address for each in psutil.net_if_addrs().get(interface, [])}
    for family in (socket.AF_INET, socket.AF_INET6):
        if address := found.get(family):
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


def cache_of(cpus: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    """How many bytes of the last cache are theirs, as many for each CPU that shares it; 0: unknown.

    A virtual machine of few CPUs may show the whole cache of its host: no CPU has more than `_MOST_CACHE`.
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


def _socket(cpus: list[int]) -> int:
    try:
        found = {
            int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id").read_text())
            for cpu in cpus
        }
    except (OSError, ValueError):
        return -1
    return found.pop() if len(found) == 1 else -1


def _booted() -> float:
    """By the clocks, as simulated hosts may have a boot_id of their own; the try that took least counts."""
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
