"""A rank of `cpulaunch bench`: ``python -m cpulaunch.bench.ranks.program OPERATION,... BYTES,...``.

ccl and gloo have a group each in the same processes, and they take turns, so what slows the machine down for
seconds slows both.  Rank 0 prints the result as one line of JSON, from which `table` makes the answer.
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
from cpulaunch.bench.ranks.meeting import Meeting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Call = Callable[[ProcessGroup], object]

TURNS = 5
SECONDS = 0.05
"""How long the repetitions of a turn take together."""

MAX_REPETITIONS = 300
WARM_UPS = 2
TIMEOUT = timedelta(minutes=5)


def main() -> int:
    import torch.distributed as dist

    operations, sizes = sys.argv[1].split(","), [int(size) for size in sys.argv[2].split(",")]
    dist.init_process_group("ccl", timeout=TIMEOUT)
    assert dist.group.WORLD
    groups = {"ccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=TIMEOUT)}
    meeting = Meeting()
    places = meeting.exchange(_place())
    hosts = _host_numbers([place["local_rank"] for place in places])
    speeds = meeting.exchange(link.measure(meeting, _address(), hosts))
    copies = {size: _copy_us(meeting, size) for size in sizes}
    turns = [
        {"operation": operation, "bytes": size, "us": _turns(meeting, groups, operation, size)}
        for operation in operations
        for size in sizes
    ]
    if meeting.rank == 0:
        result = {"places": places, "hosts": hosts, "speeds": speeds, "copies": copies, "turns": turns}
        print(json.dumps(result), flush=True)
    meeting.exchange()  # the store ends with rank 0
    dist.destroy_process_group()
    return 0


def _place() -> dict[str, Any]:
    """Return where this rank runs, and which network interfaces its host has."""
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
    """Return the speeds of network cards that are up, in Mbit/s, as their drivers state them."""
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
    """Return the number of each rank's host; the ranks of a host follow one another."""
    numbers, number = [], -1
    for local_rank in local_ranks:
        number += local_rank == 0
        numbers.append(number)
    return numbers


def _copy_us(meeting: Meeting, size: int) -> float:
    """Return the microseconds that the slowest rank takes to copy ``size`` bytes, while all ranks copy."""
    import torch

    source, target = torch.ones(size // 4), torch.empty(size // 4)
    target.copy_(source)
    meeting.exchange()
    times: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(times) < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 1e6 * float(max(meeting.exchange(statistics.median(times))))


def _turns(
    meeting: Meeting, groups: Mapping[str, ProcessGroup], operation: str, size: int
) -> dict[str, list[float]]:
    """Return, for each backend, the slowest rank's median microseconds of each turn."""
    call, halves = prepare(operation, size), 2 if operation == "send_recv" else 1
    repetitions = {}
    for name, group in groups.items():
        for _ in range(WARM_UPS):
            call(group)
        slowest = max(meeting.exchange(_seconds(call, group)))
        repetitions[name] = max(1, min(MAX_REPETITIONS, int(SECONDS / slowest)))
    found: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(TURNS):
        for name, group in groups.items():
            meeting.exchange()
            call(group)  # lets the ranks meet
            median = statistics.median(_seconds(call, group) for _ in range(repetitions[name]))
            found[name].append(1e6 / halves * max(meeting.exchange(median)))
    return found


def _seconds(call: Call, group: ProcessGroup) -> float:
    began = time.perf_counter()
    call(group)
    return time.perf_counter() - began


def prepare(operation: str, size: int) -> Call:
    """Return a call of ``operation`` on float32 tensors; the whole one (`least_wire`) has ``size`` bytes."""
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
