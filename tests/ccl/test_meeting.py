"""How the ranks of a group find each other: their requests to the store, and the keys they leave."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import DistBackendError, HashStore, TCPStore

from cpulaunch.ccl.levels import Parts
from cpulaunch.ccl.meeting import (
    Meeting,
    Peer,
    cache_of,
    cores_of,
    own_address,
    shares_cores,
    threads_of_each,
)
from cpulaunch.errors import HostError

LIMIT = timedelta(seconds=60)


class CountingStore:
    """A store that counts the requests to it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.requests[name] += 1
            return getattr(self._store, name)(*arguments)

        return call


def meet(stores: list[CountingStore]) -> None:
    """Make the ranks exchange two values.  Each rank is a thread with one of the ``stores``."""
    size = len(stores)
    received: list[Any] = [None] * size

    def run(rank: int) -> None:
        meeting = Meeting(stores[rank], rank, range(size), LIMIT)
        received[rank] = meeting.exchange("first", {"rank": rank}), meeting.exchange("second", -rank)
        meeting.end()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT.total_seconds())
    expected = [{"rank": rank} for rank in range(size)], [-rank for rank in range(size)]
    assert received == [expected] * size


@pytest.mark.parametrize("size", [2, 64, 1024])
def test_the_number_of_requests_per_rank_does_not_grow_with_the_group(size: int) -> None:
    store = HashStore()  # not torch's TCPStore, which looks up a name for each connection
    stores = [CountingStore(store) for _ in range(size)]
    meet(stores)
    deletions = sum(each.requests.pop("delete_key", 0) for each in stores)
    assert deletions <= 2 * size + 3
    # Set, wait for and get two values, and confirm that they were read.  Rank 0 publishes all ranks' values.
    assert sorted(sum(each.requests.values()) for each in stores) == [7] * (size - 1) + [11]


def test_no_keys_are_left_in_the_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT)
    before = store.num_keys()
    meet([CountingStore(store.clone()) for _ in range(5)])
    assert store.num_keys() == before


def test_a_group_can_be_made_after_its_store_has_ended() -> None:
    """If rank 0, which has the store, isn't in the group, it may end as soon as the others have met."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
    mine = TCPStore("127.0.0.1", store.port, is_master=False, timeout=LIMIT)
    del store
    with pytest.raises(RuntimeError):
        mine.add("read", 1)
    Meeting(mine, 0, range(2), LIMIT).end()


def test_a_store_that_ends_while_a_group_is_made_is_named() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
    mine = TCPStore("127.0.0.1", store.port, is_master=False, timeout=LIMIT)
    with ThreadPoolExecutor(1) as pool:
        exchange = pool.submit(Meeting(mine, 1, range(2), LIMIT).exchange, "peer", "here")
        store.wait(["peer/1"], LIMIT)
        del store
        with pytest.raises(
            DistBackendError, match="store cannot be reached while they make a group: the process"
        ):
            exchange.result()


def test_missing_ranks_are_named() -> None:
    with pytest.raises(DistBackendError, match="2 of 3 ranks did not join within 0.1 s: 1, 2"):
        Meeting(HashStore(), 0, range(3), timedelta(seconds=0.1)).exchange("peer", "here")


def test_ranks_of_a_smaller_group_have_the_jobs_rank_numbers() -> None:
    with pytest.raises(DistBackendError, match="1 of 2 ranks did not join within 0.1 s: 5"):
        Meeting(HashStore(), 0, [3, 5], timedelta(seconds=0.1)).exchange("peer", "here")


def test_a_rank_beyond_the_size_of_its_group_is_an_error_that_names_both() -> None:
    with pytest.raises(
        DistBackendError, match="this is rank 3, but the group has 2 ranks.*WORLD_SIZE too small"
    ):
        Meeting(HashStore(), 3, range(2), LIMIT)


def test_a_ranks_address_is_on_the_named_interface_or_the_route_to_the_master() -> None:
    assert own_address({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "192.0.2.1"}) == "127.0.0.1"
    assert own_address({"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    others = [each.address for name, found in psutil.net_if_addrs().items() for each in found
              if name != "lo" and each.family == socket.AF_INET]  # fmt: skip
    for address in others:
        assert own_address({"MASTER_ADDR": address}) == address
    with pytest.raises(HostError, match="FI_TCP_IFACE names the interface 'eth99', which has no address"):
        own_address({"FI_TCP_IFACE": "eth99"})


def test_ranks_of_a_host_use_the_named_interfaces_in_turn() -> None:
    several = {"GLOO_SOCKET_IFNAME": "lo,eth99"}
    assert own_address(several, 0) == own_address(several, 2) == "127.0.0.1"
    for local_rank in (1, 3):
        with pytest.raises(HostError, match="names the interface 'eth99'"):
            own_address(several, local_rank)


@pytest.mark.parametrize(
    "written",
    [
        zlib.compress(b" " * (64 << 20)),
        zlib.compress(b"[" * 100_000),
        zlib.compress(b"{}"),
        zlib.compress(b"[1]"),
        b"x",
    ],
    ids=["a bomb", "nested deeply", "no list", "too short", "not compressed"],
)
def test_malformed_values_in_the_store_are_refused(written: bytes) -> None:
    """Anybody who can connect to the store can write to it."""
    store = HashStore()
    store.set("peer", written)
    tracemalloc.start()
    try:
        with pytest.raises(DistBackendError, match="the store has malformed data for this group"):
            Meeting(store, 1, range(3), LIMIT).exchange("peer", "here")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# --- cores


def peers(*places: tuple[str, float, list[int]]) -> list[Peer]:
    """A peer for each triple of host, boot time of its machine, and CPUs."""
    return [Peer(host, 4711, cpus, Parts(), booted) for host, booted, cpus in places]


@pytest.mark.parametrize(
    ("places", "shared"),
    [
        ([("a", 10.0, [0]), ("b", 20.0, [0])], False),  # two machines
        ([("a", 10.0, [0]), ("b", 10.3, [0])], False),  # switched on together
        ([("a", 10.0, [0]), ("a", 10.0, [1]), ("b", 20.0, [0]), ("b", 20.0, [1])], False),
        ([("a", 10.0, [0]), ("b", 10.0003, [0])], True),  # two containers on one core
        ([("a", 10.0, [0]), ("b", 10.0, [1])], False),  # each has its own core
        ([("a", 10.0, [0, 1]), ("b", 10.0, [1, 2])], True),
        ([("a", 10.0, [0]), ("a", 10.0, [0])], False),  # a single oversubscribed host
    ],
)
def test_only_simulated_hosts_share_cores(places: list[tuple[str, float, list[int]]], shared: bool) -> None:
    assert shares_cores(0, peers(*places)) is shared


def test_a_group_on_a_single_host_does_not_count_as_sharing_cores() -> None:
    everybody = peers(("a", 10.0, [0]), ("a", 10.0, [1]), ("b", 10.0, [0]), ("b", 10.0, [1]))
    assert shares_cores(0, everybody)
    assert not shares_cores(0, everybody[:2])


@pytest.mark.parametrize(
    ("cpus", "cores"),
    [
        ([[0], [1]], 1),
        ([[0], [0]], 0),
        ([[0], [1], [1]], 1),  # the first rank has its own core
        ([[1], [0], [1]], 0),
        ([[0, 1], [0, 1]], 1),
        ([[0, 1], [0, 1], [0, 1]], 0),
        ([[0], [0], [0, 1, 2, 3]], 0),  # the third rank can use other cores
        ([[0, 1, 2, 3], [0], [0]], 1),
        ([[0, 1, 2, 3], [4]], 4),
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 2),
        ([[0, 1], [0, 1, 2, 3, 4, 5]], 2),
    ],
)
def test_ranks_share_their_cores_evenly(cpus: list[list[int]], cores: int) -> None:
    everybody = peers(*[("a", 10.0, its) for its in cpus])
    elsewhere = peers(("b", 10.0, cpus[0]))
    assert cores_of(everybody[0], [*everybody, *elsewhere]) == cores


@pytest.mark.parametrize(
    ("ranks", "threads"),
    [
        ([("a", [0, 1, 2, 3], 4), ("a", [4, 5, 6, 7], 4)], 4),
        ([("a", [0, 1, 2, 3], 4), ("a", [4, 5, 6, 7], 2)], 2),  # the minimum
        ([("a", [0, 1, 2, 3], 4), ("a", [0, 1, 2, 3], 4)], 2),  # both on the same CPUs
        ([("a", [0, 1, 2, 3], 4), ("b", [0, 1], 2), ("b", [0, 1], 2)], 1),
        ([("a", [0], 1), ("a", [0], 1), ("a", [0], 1)], 1),
    ],
)
def test_threads_with_their_own_cpu_are_counted(
    ranks: list[tuple[str, list[int], int]], threads: int
) -> None:
    everybody = [Peer(host, 1, cpus, Parts(), 0.0, count) for host, cpus, count in ranks]
    assert threads_of_each(everybody) == threads


@pytest.mark.parametrize(
    ("size", "shared", "cpus", "megabytes"),
    [
        ("107520K", "0-55,112-167", range(56), 52),  # a socket of 2 x 56: half of its hyperthreads
        ("32768K", "0-7", range(8), 32),  # one of several caches of an EPYC
        ("32768K", "0-7", [0], 4),
        ("491520K", "0-1", [0], 4),  # a virtual machine of 2 CPUs, which shows the cache of 120
        ("32768K", "", [0], 0),
        ("huge", "0-7", [0], 0),
    ],
)
def test_a_ranks_cache_is_its_cpus_share_of_the_last_level(
    size: str, shared: str, cpus: Sequence[int], megabytes: int, tmp_path: Path
) -> None:
    for cpu in cpus:
        (cache := tmp_path / f"cpu{cpu}" / "cache" / "index3").mkdir(parents=True)
        (cache / "size").write_text(f"{size}\n")
        (cache / "shared_cpu_list").write_text(f"{shared}\n")
    assert cache_of(cpus, tmp_path) >> 20 == megabytes
    assert cache_of([999], tmp_path) == 0


def test_ranks_of_a_machine_agree_on_its_boot_time() -> None:
    program = "from cpulaunch.ccl.meeting import Peer; print(Peer.this_process().booted)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert abs(float(done.stdout) - Peer.this_process().booted) < 0.005


# --- descriptors


def test_a_group_of_many_hosts_may_open_enough_connections() -> None:
    """The soft limit is a shell's.  A rank may have six connections to each of 504 others."""
    program = (
        "import os, resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "from cpulaunch.ccl.create import reserve_descriptors\n"
        "reserve_descriptors(10, 1); few = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "reserve_descriptors(504, 2); many = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "reserve_descriptors(1, 1); print(few >= 40, many >= min(hard, 6 * 504),"
        " many == resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True True True\n", done.stderr
