"""What ranks ask of the store, and have open to watch each other."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from cpulaunch.ccl import create

DATA_SEGMENTS_OUT = slice(156, 160)  # of struct tcp_info, <linux/tcp.h>


def requests_of_a_wait(ranks: int, seconds: float) -> int:
    """How many messages this rank sends over TCP while rank 0 is late, in a group that takes itself for larger."""
    interval = create.store_interval
    create.store_interval = lambda _: interval(ranks)
    try:
        group = dist.new_group(backend="ccl")
    finally:
        create.store_interval = interval
    dist.barrier(group)
    before = _sent()
    if dist.get_rank() == 0:
        time.sleep(seconds)  # what the others do meanwhile is the test
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
    """The descriptors of processes that this rank has open, with so many groups more."""
    made = [dist.new_group(backend="ccl") for _ in range(groups)]
    for group in made:
        dist.all_reduce(torch.ones(1), group=group)
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry))
    return sum("pidfd" in link for link in links)
