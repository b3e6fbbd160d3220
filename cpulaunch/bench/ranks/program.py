"""A rank of `cpulaunch bench`: ``python -m cpulaunch.bench.ranks.program OPERATION,... BYTES,...``.

The same processes have a group of ccl and a group of gloo, which take turns, so a disturbance of some seconds
affects both.  Rank 0 prints the measurements as one line of JSON; `table` formats them.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpulaunch.bench.limits import other_end
from cpulaunch.bench.ranks import link
from cpulaunch.bench.ranks.barrier import Barrier

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Call = Callable[[ProcessGroup], object]

TURNS = 5
SECONDS = 0.05
"""Total duration of the repetitions in a turn."""

MAX_REPETITIONS = 300
WARM_UPS = 2
TIMEOUT = timedelta(minutes=5)


def main() -> int:
    import torch.distributed as dist

    operations, sizes = sys.argv[1].split(","), [int(size) for size in sys.argv[2].split(",")]
    dist.init_process_group("ccl", timeout=TIMEOUT)
    assert dist.group.WORLD
    groups = {"ccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=TIMEOUT)}
    barrier = Barrier()
    places = barrier.exchange(_place())
    hosts = _host_numbers([place["local_rank"] for place in places])
    speeds = barrier.exchange(link.measure(barrier, _address(), hosts))
    copies = {size: _copy_us(barrier, size) for size in sizes}
    turns = [
        {"operation": operation, "bytes": size, "us": _turns(barrier, groups, operation, size)}
        for operation in operations
        for size in sizes
    ]
    if barrier.rank == 0:
        result = {"places": places, "hosts": hosts, "speeds": speeds, "copies": copies, "turns": turns}
        print(json.dumps(result), flush=True)
    barrier.exchange()  # when rank 0 exits, the store is gone
    dist.destroy_process_group()
    return 0


def _place() -> dict[str, Any]:
    """Return this rank's host and cores, and the host's network interfaces."""
    import torch

    text = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return {
        "host": socket.gethostname(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "cpu": models[0] if models else os.uname().machine,
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "host_cpus": os.cpu_count() or 1,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "nominal": _nominal_speeds(),
    }


def _nominal_speeds() -> dict[str, int]:
    """Return the speeds in Mbit/s that the drivers of active network cards state."""
    speeds = {}
    for directory in Path("/sys/class/net").iterdir():
        with suppress(OSError, ValueError):
            if (directory / "operstate").read_text().strip() != "down":
                speeds[directory.name] = int((directory / "speed").read_text())
    return {name: speed for name, speed in sorted(speeds.items()) if speed > 0}


def _address() -> str:
    """Return this host's address on the network of the job."""
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(master, TIMEOUT.total_seconds()) as connection:
        return str(connection.getsockname()[0])


def _host_numbers(local_ranks: list[int]) -> list[int]:
    """Return the number of each rank's host.  The ranks of a host are consecutive."""
    numbers, number = [], -1
    for local_rank in local_ranks:
        number += local_rank == 0
        numbers.append(number)
    return numbers


def _copy_us(barrier: Barrier, size: int) -> float:
    """Return the slowest rank's time to copy ``size`` bytes, in microseconds, while all ranks copy."""
    import torch

    source, target = torch.ones(size // 4), torch.empty(size // 4)
    target.copy_(source)
    barrier.exchange()
    times: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(times) < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 1e6 * float(max(barrier.exchange(statistics.median(times))))


def _turns(
    barrier: Barrier, groups: Mapping[str, ProcessGroup], operation: str, size: int
) -> dict[str, list[float]]:
    """Return backend → for each turn, the slowest rank's median time in microseconds."""
    call, halves = prepare(operation, size), 2 if operation == "send_recv" else 1
    repetitions = {}
    for name, group in groups.items():
        for _ in range(WARM_UPS):
            call(group)
        slowest = max(barrier.exchange(_seconds(call, group)))
        repetitions[name] = max(1, min(MAX_REPETITIONS, int(SECONDS / slowest)))
    found: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(TURNS):
        for name, group in groups.items():
            barrier.exchange()
            call(group)  # synchronize the ranks
            median = statistics.median(_seconds(call, group) for _ in range(repetitions[name]))
            found[name].append(1e6 / halves * max(barrier.exchange(median)))
    return found


def _seconds(call: Call, group: ProcessGroup) -> float:
    began = time.perf_counter()
    call(group)
    return time.perf_counter() - began


def prepare(operation: str, size: int) -> Call:
    """Return a function that calls ``operation`` on float32 tensors.

    The whole tensor (see `least_wire`) has ``size`` bytes.
    """
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    if operation.startswith("send_recv"):
        return _round_trip(torch.ones(size // 4), rank, other_end(operation, ranks))
    part = torch.ones(max(1, size // 4 // ranks))
    whole, other = torch.ones(part.numel() * ranks), torch.ones(part.numel() * ranks)
    calls: dict[str, Call] = {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, 0, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(other, whole, group=group),
    }
    return calls[operation]


def _round_trip(tensor: Any, rank: int, end: int) -> Call:
    import torch.distributed as dist

    def first(group: ProcessGroup) -> None:
        dist.send(tensor, end, group=group)
        dist.recv(tensor, end, group=group)

    def second(group: ProcessGroup) -> None:
        dist.recv(tensor, 0, group=group)
        dist.send(tensor, 0, group=group)

    return first if rank == 0 else second if rank == end else lambda group: None


if __name__ == "__main__":
    sys.exit(main())
