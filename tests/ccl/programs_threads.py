"""Test programs for ranks of several threads."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from programs import Groups

from cpulaunch.ccl.load import load_group

BYTES = 8 << 20
PR_GET_TIMERSLACK = 30
LIMIT = timedelta(seconds=60)


def start(
    kind: str, *, in_shared_memory: bool = False, asynchronous: bool = False
) -> tuple[Any, torch.Tensor]:
    """Start a collective of BYTES per rank; return its work and its result."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full([BYTES // 4], float(rank + 1))
    if in_shared_memory:
        assert Groups.ccl._get_backend(torch.device("cpu")).share_memory(mine)
    if kind == "all_reduce":
        return dist.all_reduce(mine, async_op=asynchronous), mine
    if kind == "broadcast":
        return dist.broadcast(mine, 0, async_op=asynchronous), mine
    result = torch.empty([size * BYTES // 4 if kind == "all_gather" else BYTES // 4 // size * size])
    if kind == "all_gather":
        return dist.all_gather_into_tensor(result, mine, async_op=asynchronous), result
    if kind == "all_to_all":
        return dist.all_to_all_single(result, mine[: result.numel()], async_op=asynchronous), result
    result = torch.empty([BYTES // 4 // size])
    return dist.reduce_scatter_tensor(result, mine[: size * result.numel()], async_op=asynchronous), result


def moved(kind: str, *, in_shared_memory: bool = False, asynchronous: bool = False) -> list[int]:
    """The bytes that this thread copies and sums in a collective for which it waits, and the result's sum."""
    core = load_group().core
    before = core.moved_by_this_thread()
    work, result = start(kind, in_shared_memory=in_shared_memory, asynchronous=asynchronous)
    if asynchronous:
        work.wait()
    after = core.moved_by_this_thread()
    return [*[b - a for a, b in zip(before, after, strict=True)], int(result.double().sum())]


_moved_before: dict[int, tuple[int, int]] = {}  # totals of each background thread at its last completion


def moved_in_background(kind: str, rank: int) -> tuple[list[int], list[int], int] | None:
    """The bytes that this thread and the background thread of `rank` copy and sum, and the result's sum.

    This thread only starts the collective.  The other ranks start it after this thread has set its callback.
    """
    store = dist.PrefixStore(f"{kind} {rank}", dist.distributed_c10d._get_default_store())
    if dist.get_rank() != rank:
        store.wait(["started"], LIMIT)
        start(kind)
        return None
    core, background, done = load_group().core, [], threading.Event()
    before = core.moved_by_this_thread()
    work, result = start(kind, asynchronous=True)
    after = core.moved_by_this_thread()

    def completed(_: object) -> None:  # runs in the background thread
        now, thread = core.moved_by_this_thread(), threading.get_native_id()
        then = _moved_before.get(thread, (0, 0))
        _moved_before[thread] = now
        background.extend(b - a for a, b in zip(then, now, strict=True))
        done.set()

    work.get_future().add_done_callback(completed)
    store.set("started", "yes")
    assert done.wait(LIMIT.total_seconds())
    return [b - a for a, b in zip(before, after, strict=True)], background, int(result.double().sum())


def cores_of_threads() -> list[tuple[str, str]]:
    """The names of the communication threads, and the cores that each may use."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        allowed = re.search(r"\nCpus_allowed_list:\s+(\S+)", (task / "status").read_text())
        if name in ("cpulaunch-ccl", "cpulaunch-copy") and allowed:
            found.add((name, allowed[1]))
    return sorted(found)


def background_threads() -> int:
    """The number of threads in this process after collectives that nobody waits for."""
    torch.ones(1 << 20).sum()  # starts the OpenMP team of this thread
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        work, _ = start(kind, asynchronous=True)
        done = threading.Event()
        work.get_future().add_done_callback(lambda _, done=done: done.set())
        assert done.wait(LIMIT.total_seconds())
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("cpulaunch-ccl\n")


def _sleeps() -> int:
    status = Path(f"/proc/self/task/{os.getpid()}/status").read_text()
    found = re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", status)
    assert found
    return int(found[1])


def timer_slack() -> tuple[int, int]:
    """The timer slack of this thread before and after it slept while it waited for the last rank."""
    store = dist.PrefixStore("timer_slack", dist.distributed_c10d._get_default_store())
    last, x = dist.get_world_size() - 1, torch.ones(10)
    slack = ctypes.CDLL(None).prctl
    before, asleep, stop = slack(PR_GET_TIMERSLACK), _sleeps(), threading.Event()

    def watch() -> None:
        while _sleeps() < asleep + 100 and not stop.wait(0.01):
            pass
        store.set("sleeps", "yes")

    if dist.get_rank() == last:
        store.wait(["sleeps"], LIMIT)
    else:
        watcher = threading.Thread(target=watch)
        watcher.start()
    dist.all_reduce(x)
    if dist.get_rank() != last:
        stop.set()
        watcher.join()
    return before, slack(PR_GET_TIMERSLACK)
