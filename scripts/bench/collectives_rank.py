"""A rank of ``multihost.py collectives``: how long an operation takes, and how much its host sends for it.

    collectives_rank.py BACKEND local|rank|free OPERATION BYTES...

``local`` runs on the core with the number of its rank on the host, ``rank`` on that of its rank.
Prints JSON: bytes → the median and the mean of this rank's milliseconds, the bytes that its host has sent in
sizes of the tensor, and the repetitions.  ``send_recv:1`` and ``send_recv:last`` are half a round trip
between rank 0 and that rank; the other ranks sleep meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from support.wire import Meeting, other_end

if TYPE_CHECKING:
    from torch import Tensor

SECONDS = 0.7  # for the repetitions of a size
WARM_UPS = 2
LEAST, MOST = 5, 2000


def main() -> int:
    backend, where, operation, *sizes = sys.argv[1:]
    if number := os.environ.get({"local": "LOCAL_RANK", "rank": "RANK"}.get(where, "")):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(number) % len(cores)]})  # before torch counts the cores
    import torch.distributed as dist

    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    meeting = Meeting()
    print(json.dumps({size: measure(meeting, operation, int(size)) for size in sizes}), flush=True)
    dist.barrier()  # the store that the others still read from ends with rank 0
    dist.destroy_process_group()
    return 0


def measure(meeting: Meeting, operation: str, size: int) -> dict[str, float]:
    call = prepare(operation, size)
    warm = [seconds(call) for _ in range(WARM_UPS)]
    slowest = max(map(float, meeting.exchange(warm[-1])))
    repetitions = max(LEAST, min(MOST, int(SECONDS / slowest)))
    times: list[float] = []
    sent = meeting.count(lambda: times.extend(seconds(call) for _ in range(repetitions)))
    ms = 500 if operation.startswith("send_recv") else 1000
    return {
        "ms": ms * statistics.median(times),
        "mean_ms": ms * statistics.mean(times),
        "wire": sent / (repetitions * size),
        "repetitions": repetitions,
    }


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def prepare(operation: str, size: int) -> Callable[[], object]:
    """The operation on float32 tensors, of which the whole one, as `least_wire` says, has ``size`` bytes."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = torch.ones(size // 4 // ranks)
    whole, other = torch.ones(part.numel() * ranks), torch.ones(part.numel() * ranks)
    if operation.startswith("send_recv"):
        return round_trip(torch.zeros(size // 4), rank, other_end(operation, ranks))
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
    return calls[operation]


def round_trip(tensor: Tensor, rank: int, end: int) -> Callable[[], object]:
    import torch.distributed as dist

    def first() -> None:
        dist.send(tensor, end)
        dist.recv(tensor, end)

    def second() -> None:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)

    return first if rank == 0 else second if rank == end else lambda: None


if __name__ == "__main__":
    sys.exit(main())
