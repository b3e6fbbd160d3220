"""Test programs: ranks' requests to the store, how ranks watch each other, and ranks late to a new group."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from programs import LIMIT

from cpulaunch.ccl import create

DATA_SEGMENTS_OUT = slice(156, 160)  # of struct tcp_info, <linux/tcp.h>


def requests_of_a_wait(ranks: int, seconds: float) -> int:
    """The number of TCP segments that this rank sends while it waits for rank 0, at the intervals of a group
    of ``ranks`` ranks."""
    interval = create.store_interval
    create.store_interval = lambda _: interval(ranks)
    try:
        group = dist.new_group(backend="ccl")
    finally:
        create.store_interval = interval
    dist.barrier(group)
    before = _sent()
    if dist.get_rank() == 0:
        time.sleep(seconds)  # the test counts the requests in this time
    dist.all_reduce(torch.ones(1), group=group)
    return _sent() - before


def _sent() -> int:
    return sum(
        struct.unpack("I", each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)[DATA_SEGMENTS_OUT])[0]
        for each in _connections()
    )


def _connections() -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found


def watched_processes(groups: int) -> int:
    """The number of pidfds that this rank has open after making further groups."""
    made = [dist.new_group(backend="ccl") for _ in range(groups)]
    for group in made:
        dist.all_reduce(torch.ones(1), group=group)
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry))
    return sum("pidfd" in link for link in links)


def others_go_on(late_to: str, times: int) -> list[float]:
    """Ranks 0 and 1 reduce among themselves ``times`` times before rank 2 joins a new group of all three.

    Rank 2 is late either to "call" new_group or to "connect", after all ranks have exchanged addresses.
    """
    rank, key = dist.get_rank(), f"late to {late_to}"
    store = dist.distributed_c10d._get_default_store().clone()
    pair, x, made, fallback = (
        dist.new_group([0, 1], timeout=LIMIT),
        torch.ones(1000),
        [],
        create._gloo_fallback,
    )
    if rank == 2 and late_to == "call":
        store.wait([key], LIMIT)
    elif rank == 2:
        create._gloo_fallback = lambda *given: (store.wait([key], LIMIT), fallback(*given))[1]
    making = threading.Thread(target=lambda: made.append(dist.new_group(timeout=LIMIT)))
    making.start()
    if rank < 2:
        for _ in range(times):
            dist.all_reduce(x.fill_(1), group=pair)
        store.set(key, "")
    making.join()
    create._gloo_fallback = fallback
    dist.all_reduce(y := torch.ones(1), group=made[0])
    return [x[-1].item(), y.item()]
