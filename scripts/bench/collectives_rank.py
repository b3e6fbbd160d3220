"""A rank of ``multihost.py collectives``, which measures an operation's time and the bytes that hosts send.

    collectives_rank.py OPERATION CONTENDER,... BYTES...

A contender is a backend with a binding.  ``BACKEND:local`` is pinned to the core with the number of its
local rank, ``BACKEND:rank`` to the core with the number of its rank, and ``BACKEND:free`` is not pinned.
Contenders have separate groups in the same processes and take turns, so a busy machine affects all of them.

Prints JSON: bytes → contender → this rank's median milliseconds in each turn, the bytes that its host sent
for an operation ÷ those of the tensor, and the repetitions of a turn.  ``send_recv:1`` and
``send_recv:last`` measure half a round trip between rank 0 and that rank, while other ranks sleep.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from support.wire import Meeting

from cpulaunch.bench.ranks import program

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

    Call = Callable[[ProcessGroup], object]

TURNS = 7
SECONDS = 0.1  # seconds for the repetitions of a turn
MOST = 300
IN_FLIGHT = 8  # of `all_reduces`
WARM_UPS = 2
TIMEOUT = timedelta(seconds=120)

CORES = sorted(os.sched_getaffinity(0))
PIN_BY = {"local": "LOCAL_RANK", "rank": "RANK"}


class Contender:
    """A group of all ranks, whose threads and callers run on certain cores."""

    def __init__(self, name: str) -> None:
        import torch.distributed as dist

        backend, pin = name.split(":")
        number = os.environ.get(PIN_BY.get(pin, ""))
        self._cores = {CORES[int(number) % len(CORES)]} if number else set(CORES)
        os.sched_setaffinity(0, self._cores)  # the group's threads inherit it
        self._group = dist.new_group(backend=backend, timeout=TIMEOUT)

    def seconds(self, call: Call, repetitions: int) -> list[float]:
        """Return how long each repetition takes."""
        os.sched_setaffinity(0, self._cores)
        return [took(call, self._group) for _ in range(repetitions)]


def took(call: Call, group: ProcessGroup) -> float:
    began = time.perf_counter()
    call(group)
    return time.perf_counter() - began


def main() -> int:
    import torch.distributed as dist

    operation, names, *sizes = sys.argv[1:]
    dist.init_process_group("gloo", timeout=TIMEOUT)
    meeting = Meeting()
    contenders = {name: Contender(name) for name in names.split(",")}
    found = {size: measure(meeting, contenders, operation, int(size)) for size in sizes}
    print(json.dumps(found), flush=True)
    meeting.exchange()  # rank 0 has the store, which other ranks may still read
    dist.destroy_process_group()
    return 0


def measure(
    meeting: Meeting, contenders: Mapping[str, Contender], operation: str, size: int
) -> dict[str, dict[str, Any]]:
    call = prepare(operation, size)
    ms = 500 if operation.startswith("send_recv") else 1000
    repetitions, wire = {}, {}
    for name, contender in contenders.items():
        contender.seconds(call, WARM_UPS)
        slowest = max(map(float, meeting.exchange(contender.seconds(call, 1)[0])))
        repetitions[name] = count = max(1, min(MOST, int(SECONDS / slowest)))
        wire[name] = meeting.count(partial(contender.seconds, call, count)) / (count * size)
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, contender in contenders.items():
            meeting.exchange()
            # In the first repetition, ranks wait for each other.
            _first, *times = contender.seconds(call, 1 + repetitions[name])
            turns[name].append(ms * statistics.median(times))
    return {
        name: {"ms": turns[name], "wire": wire[name], "repetitions": repetitions[name]} for name in contenders
    }


def prepare(operation: str, size: int) -> Call:
    """Return the operation on float32 tensors.  The whole tensor (see `least_wire`) has ``size`` bytes."""
    import torch
    import torch.distributed as dist

    if operation not in ("all_reduces", "all_reduce_shared"):
        return program.prepare(operation, size)
    whole = torch.ones(size // 4)
    if operation == "all_reduces":
        return lambda group: wait_for_all(
            [dist.all_reduce(each, group=group, async_op=True) for each in whole.tensor_split(IN_FLIGHT)]
        )
    shared = in_shared_memory(whole.clone())
    return lambda group: dist.all_reduce(shared if dist.get_backend(group) == "ccl" else whole, group=group)


def in_shared_memory(tensor: Tensor) -> Tensor:
    from cpulaunch.ccl.load import load_group

    assert load_group().module.ProcessGroupCCL.share_memory(tensor)
    return tensor


def wait_for_all(works: Sequence[Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


if __name__ == "__main__":
    sys.exit(main())
