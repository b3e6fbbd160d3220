"""Time and processor time of rank 0, which has torch's store, until the ranks of a ccl group know each other.

    python scripts/bench/meeting.py [--ranks 64 256 1024] [--rounds 3]

The other ranks are threads of a few processes, each with a connection to the store of its own.  They send the
data of ranks on several hosts, in four rounds (`cpulaunch.ccl.create`), and connect only to the store.
Before that, torch's store asks the name server for the name of each client, one after the other, so that with
a slow one the ranks don't come together in time. Printed, as min / median / max: seconds of processor time of
rank 0's process, with the store's thread, and seconds until it knows all, which the other processes share the
machine's cores for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns where a client's name can't be looked up

from torch.distributed import TCPStore

from cpulaunch.ccl.meeting import Meeting, Peer

RANKS_IN_PROCESS = 256
LIMIT = timedelta(seconds=120)
STACK_SIZE = 256 << 10
"""Bytes of a thread's stack."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--others", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.others:
        be_others(*options.others)
        return 0
    print("| ranks | processor time of rank 0, s | until it knows all, s |\n|---|---|---|")
    for size in options.ranks:
        pairs = [one_meeting(size) for _ in range(options.rounds)]
        print(f"| {size:,} | " + " | ".join(spread(each) for each in zip(*pairs, strict=True)) + " |")
    return 0


def one_meeting(size: int) -> tuple[float, float]:
    """Processor time and time, in seconds, of rank 0 among ``size``."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
    others = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--others",
                *map(str, (store.port, first, min(first + RANKS_IN_PROCESS, size), size)),
            ]
        )
        for first in range(1, size, RANKS_IN_PROCESS)
    ]
    try:
        store.wait([f"here/{rank}" for rank in range(1, size)], LIMIT)
        before = time.process_time(), time.perf_counter()
        store.set("go", "")
        meet(store, 0, size)
        after = time.process_time(), time.perf_counter()
        if any(each.wait(LIMIT.total_seconds()) for each in others):
            raise SystemExit("some ranks have failed")
    finally:
        for each in others:
            each.kill()
            each.wait()
    return after[0] - before[0], after[1] - before[1]


def meet(store: TCPStore, rank: int, size: int) -> None:
    """As ``cpulaunch.ccl.create`` does."""
    meeting = Meeting(store, rank, range(size), LIMIT)
    said = (
        ("peer", Peer.this_process()),
        ("memory", -1),
        ("mapped", True),
        ("address", ("127.0.0.1", rank, "")),
    )
    for name, mine in said:
        assert len(meeting.exchange(name, mine)) == size
    meeting.end()


def be_others(port: int, first: int, end: int, size: int) -> None:
    def run(rank: int) -> None:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
        store.set(f"here/{rank}", "")
        store.wait(["go"], LIMIT)
        meet(store, rank, size)

    threading.stack_size(STACK_SIZE)
    with ThreadPoolExecutor(end - first) as pool:
        list(pool.map(run, range(first, end)))  # raises what a rank has raised


def spread(values: tuple[float, ...]) -> str:
    return f"{min(values):.2f} / {statistics.median(values):.2f} / {max(values):.2f}"


if __name__ == "__main__":
    sys.exit(main())
