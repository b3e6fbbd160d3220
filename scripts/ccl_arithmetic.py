"""Write docs/ccl-arithmetic.md from what the core of ccl counts.  ``scripts/test.sh --all`` compares them.

This command updates the page: ``UPDATE_GOLDEN=1 pytest tests/ccl/test_native.py -k arithmetic``.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "ccl-arithmetic.md"

CORE = 10e9
"""Bytes per second that a core reads and writes."""
NODE = 200e9
"""Bytes per second that the memory of a NUMA node carries."""
LINK = 12.5e9
"""Bytes per second of a link of 100 Gbit/s, in each direction."""
GRADIENTS = 1e9
"""Bytes of a model's gradients."""
THREADS = 56
"""Threads of a rank that has a NUMA node to itself."""
HOSTS = 64

LARGE = "all_reduce of 25 MB"
SHARED = f"{LARGE} in shared memory"
_LARGE_BYTES = 25 << 20

HEAD = """\
# Collectives on larger machines, by arithmetic

The figures of this page are calculated, not measured, because we have no larger machines than those of
[ccl.md](ccl-measured.md#how-fast). `scripts/ccl_arithmetic.py` generates the page.

The core itself counts bytes, messages and rounds (the programs `counts` and `steps` in `tests/ccl/native`),
with ranks that are threads of one process. The times assume that a core reads and writes 10 GB/s, the memory
of a NUMA node carries 200 GB/s, and a link of 100 Gbit/s carries 12.5 GB/s. They are lower limits: no rank
waits for another.
"""

WITHIN = """\
## Within a host

In an all_reduce of S bytes among the R ranks of a host, each rank copies and sums these amounts. A sum reads
a part of all ranks' tensors, and writes the part once. A copy reads and writes.
"""

SERVER = f"""\
## One server of 2 × {THREADS} cores

Each of its two nodes has a rank of {THREADS} threads, and the gradients have 1 GB:
"""

AFTER_SERVER = """\
With all threads, the limits are the memory and the connection between the sockets: each rank reads half of
the other's tensor and writes half of it. With one thread, that thread is the limit. One thread moves the
buckets that DDP starts before the end of the backward pass; once the program waits for them, all threads do.
"""

SERVERS = """\
## Four of these servers

Each has a link of 100 Gbit/s. One thread of a rank sends and receives the rank's part, or k communication
threads do so over k connections (`--ccl-worker-count k`). The kernel copies sent and received data, so the
threads read and write four times as much as they send. The table has the times for one thread, if one
connection is as fast as the thread; k threads take a k-th of them.
"""

MANY = f"""\
## {HOSTS} hosts

These are the counts of a rank for one call, with one rank on each host. A round ends when ranks need data
that others send in it. The descriptors are those of the group: a rank listens, has a connection to each
peer, and polls many of them at once. The 25 MB are 25 pieces, which follow each other through four rounds.
"""


class Counts:
    """The work of the busiest rank, by layout, collective and key; layout 2,2 is two hosts of two ranks."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._known: dict[str, dict[str, dict[str, float]]] = {}

    def of(self, layout: str, collective: str) -> dict[str, float]:
        if layout not in self._known:
            self._known[layout] = self._count(layout)
        return self._known[layout][collective]

    def times(self, layout: str, collective: str, key: str) -> float:
        """Return a count of bytes, divided by the bytes of the tensor."""
        return self.of(layout, collective)[key] / _LARGE_BYTES

    def _count(self, layout: str) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for what in ("steps", "counts"):
            command = [self._program, layout, "1", "1", what]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            for line in done.stdout.splitlines():
                name, _, rest = line.partition(": ")
                numbers = re.findall(r"(\w+)=(\S+)", rest)
                found.setdefault(name, {}).update((key, float(number)) for key, number in numbers)
        return found


def page(program: str) -> str:
    """Return the page's text, with the counts of this program."""
    counts = Counts(program)
    parts = [HEAD, WITHIN, _within(counts), SERVER, _server(counts), AFTER_SERVER]
    parts += [SERVERS, _servers(counts), MANY, _many(counts)]
    return "\n".join(parts)


def _moved(counts: Counts, ranks: int, collective: str) -> tuple[float, float, float, float]:
    """Return how much a rank copies, reads for sums, writes as sums, and moves in all, in tensors."""
    copied = counts.times(str(ranks), collective, "copied")
    summed = counts.times(str(ranks), collective, "summed")
    return copied, summed, summed / ranks, 2 * copied + summed + summed / ranks


def _within(counts: Counts) -> str:
    rows = [
        "| | R | copied | read by sums | written by sums | read and written in all |",
        "|---|---|---|---|---|---|",
    ]
    for name, collective in (("through slots", LARGE), ("tensors in shared memory", SHARED)):
        for ranks in (2, 8):
            cells = [f"{each:.2f} S" for each in _moved(counts, ranks, collective)]
            rows.append(f"| {name} | {ranks} | {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def _server(counts: Counts) -> str:
    slots, shared = (_moved(counts, 2, collective)[-1] * GRADIENTS for collective in (LARGE, SHARED))
    rows = [
        ("one thread of a rank, as in the background, through slots", slots, CORE),
        ("one thread of a rank, tensors in shared memory", shared, CORE),
        (f"each of {THREADS} threads, while the rank waits, through slots", slots / THREADS, CORE),
        (f"each of {THREADS} threads, tensors in shared memory", shared / THREADS, CORE),
        (
            "a node's memory: the tensor is read, read again before it is written, and written "
            "(slots stay in the caches)",
            3 * GRADIENTS,
            NODE,
        ),
    ]
    lines = [f"| {what} | {_bytes(number)} | {_time(number / speed)} |" for what, number, speed in rows]
    return "\n".join(["| | bytes | time |\n|---|---|---|", *lines, ""])


def _servers(counts: Counts) -> str:
    rows = [
        "| ranks on a host | sent by each | read and written by its thread | time | the link |",
        "|---|---|---|---|---|",
    ]
    for ranks in (2, 4, 8):
        sent = counts.times(",".join([str(ranks)] * 4), LARGE, "sent_bytes") * GRADIENTS
        rows.append(
            f"| {ranks} | {_bytes(sent)} | {_bytes(4 * sent)} | {_time(4 * sent / CORE)} "
            f"| {_time(ranks * sent / LINK)} |"
        )
    text = (
        "So four ranks of 28 threads nearly fill such a link. Eight ranks of 14 do, or two with three "
        "communication\nthreads each. With `--compress-gradients bf16` all of these times are half as long."
    )
    return "\n".join([*rows, "", text, ""])


def _many(counts: Counts) -> str:
    layout = ",".join(["1"] * HOSTS)
    rows = ["| | rounds | messages | bytes sent | peers | descriptors |\n|---|---|---|---|---|---|"]
    for name in (LARGE, "all_reduce of 1 MB", "all_reduce of 4 KB", "barrier", "all_gather of 4 KB",
                 "reduce_scatter of 4 KB", "reduce_scatter of 4 MB", "all_to_all of 16 KB"):  # fmt: skip
        its = counts.of(layout, name)
        cells = [its["rounds"], its["messages"], its["bytes"], its["peers"], its["descriptors"]]
        rows.append(f"| {name} | {' | '.join(f'{each:,.0f}' for each in cells)} |")
    seconds = counts.of(layout, LARGE)["bytes"] / LINK
    text = f"The link takes {_time(seconds)} for the 25 MB, and a thread {_time(4 * LINK / CORE * seconds)}."
    return "\n".join([*rows, "", text, ""])


def _bytes(number: float) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 0.1e9 else f"{number / 1e6:.2g} MB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
