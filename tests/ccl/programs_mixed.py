"""Test programs for many collectives: in sequence, concurrently, and in several groups, on any hosts."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import programs_names as names
import torch
import torch.distributed as dist
from programs import LIMIT, movement, reduction

SHAPES = ([1], [7], [2, 3, 5], [6, 7], [0], [0, 3], [129], [4097], [65_537], [3, 1000], [300_000])
LENGTHS = (0, 1, 100, 5_000, 70_000, 400_000)
LAYOUTS = ("plain", "plain", "strided", "transposed")
SETTLED = 10.0
"""Seconds within which background threads must release a group's resources."""


def mix(seed: int, count: int) -> int:
    """Run random operations, the same in all ranks, and compare their results with gloo's."""
    draw = random.Random(seed)
    for _ in range(count):
        function, arguments = drawn(draw)
        try:
            function(*arguments)
        except Exception as error:
            raise AssertionError(f"{function.__name__}{arguments}") from error
    return count


def drawn(draw: random.Random) -> tuple[Callable[..., None], tuple[Any, ...]]:
    shape, layout = draw.choice(SHAPES), draw.choice(LAYOUTS)
    rest = (shape, layout, draw.randrange(8), draw.randrange(10_000), draw.random() < 0.5)
    if draw.random() < 0.5:
        return reduction, (draw.choice(names.REDUCTIONS), *draw.choice(names.REDUCED + names.BITWISE), *rest)
    return movement, (draw.choice(names.MOVEMENTS), draw.choice(names.MOVED), *rest)


class Begun(NamedTuple):
    """A started operation, the tensors that it writes, and their expected values."""

    name: str
    works: list[Any]
    outputs: list[torch.Tensor]
    expected: list[torch.Tensor]

    def check(self) -> None:
        for work in self.works:
            work.wait()
        for one, other in zip(self.outputs, self.expected, strict=True):
            assert one.equal(other), self.name


def numbers(seed: int, rank: int, length: int) -> torch.Tensor:
    return (torch.arange(length) * 7 + seed) % 11 + float(rank)


def begin(kind: str, group: Any, length: int, seed: int) -> Begun:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    root, before, after = seed % size, (rank - 1) % size, (rank + 1) % size
    every = [numbers(seed, r, length) for r in range(size)]
    mine, blank = every[rank].clone(), torch.zeros(length)
    blanks = [torch.zeros(length) for _ in range(size)]
    parts = [numbers(seed + r, rank, length) for r in range(size)]  # what this rank sends to each rank
    theirs = [numbers(seed + rank, r, length) for r in range(size)]  # what each rank sends to this rank
    total = torch.stack(every).sum(0)
    both = {"group": group, "async_op": True}
    operations: dict[str, tuple[Callable[[], list[Any]], list[torch.Tensor], list[torch.Tensor]]] = {
        "all_reduce": (lambda: [dist.all_reduce(mine, **both)], [mine], [total]),
        "reduce": (
            lambda: [dist.reduce(mine, group_dst=root, **both)], [mine], [total if rank == root else every[rank]]),
        "broadcast": (lambda: [dist.broadcast(mine, group_src=root, **both)], [mine], [every[root]]),
        "all_gather": (lambda: [dist.all_gather(blanks, mine, **both)], blanks, every),
        "gather": (
            lambda: [dist.gather(mine, blanks if rank == root else None, group_dst=root, **both)],
            *((blanks, every) if rank == root else ([], []))),
        "scatter": (
            lambda: [dist.scatter(blank, parts if rank == root else None, group_src=root, **both)],
            [blank], [theirs[root]]),
        "reduce_scatter": (
            lambda: [dist.reduce_scatter(blank, parts, **both)], [blank], [torch.stack(theirs).sum(0)]),
        "all_to_all": (lambda: [dist.all_to_all(blanks, parts, **both)], blanks, theirs),
        "messages": (
            lambda: [dist.isend(mine, group_dst=after, group=group), dist.irecv(blank, group_src=before, group=group)],
            [blank], [every[before]]),
        "barrier": (lambda: [dist.barrier(**both)], [], []),
    }  # fmt: skip
    start, outputs, expected = operations[kind]
    return Begun(f"{kind} of {length}", start(), outputs, expected)


KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
         "messages", "barrier")  # fmt: skip


def any_order(seed: int, count: int) -> str:
    """Keep many operations in flight.  Each rank waits for them in its own order."""
    draw = random.Random(seed)
    begun = [
        begin(draw.choice(KINDS), dist.group.WORLD, draw.choice(LENGTHS), number) for number in range(count)
    ]
    random.Random(seed + dist.get_rank()).shuffle(begun)
    for one in begun:
        one.check()
    return "ok"


def two_threads(seed: int, count: int) -> str:
    """Two threads use two groups each: one of all ranks, and one of two ranks on different hosts."""
    size = dist.get_world_size()
    members = [list(range(size)), [0, size - 1], list(range(size)), [0, size // 2]]
    groups = [dist.new_group(each, timeout=LIMIT) for each in members]
    errors: list[Exception] = []

    def use(number: int) -> None:
        draw = random.Random(seed + number)
        try:
            for _ in range(count):
                group = draw.choice(groups[2 * number : 2 * number + 2])
                kind, length, its_seed = draw.choice(KINDS), draw.choice(LENGTHS), draw.randrange(10_000)
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    begin(kind, group, length, its_seed).check()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return "ok"


def digests() -> list[str]:
    """Digests of sums of random numbers.  Their rounding depends on the order of summation."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for length in (10, 1_000, 50_000, 2_000_003):
            torch.manual_seed(length + dist.get_rank())
            noise = torch.randn(length).to(dtype)
            dist.all_reduce(noise)
            found.append(hashlib.sha256(noise.view(torch.uint8).numpy().tobytes()).hexdigest())
    return found


def held() -> dict[str, Any]:
    """This process's resources, such as descriptors and mappings, and the ranks' keys in the store."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    # torch leaves keys in the store, too, for example keys of its barriers.
    keys = dist.distributed_c10d._get_default_store()._underlying_non_prefix_store.list_keys()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": sum("memfd" in line for line in maps),
        "threads": len(os.listdir("/proc/self/task")),
        "keys": sorted(key for key in keys if "cpulaunch-ccl" in key and "heartbeat" not in key),
        "heartbeats": sum("cpulaunch-ccl/heartbeat" in key for key in keys),
    }


def use_groups(count: int) -> None:
    """Make, use and destroy groups, in turn with all ranks and with the first and the last rank."""
    for number in range(count):
        size = dist.get_world_size()
        group = dist.new_group([0, size - 1] if number % 2 else list(range(size)), timeout=LIMIT)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            for kind in ("all_reduce", "messages"):
                begin(kind, group, 20_000, number).check()
            dist.destroy_process_group(group)
    dist.barrier()  # no rank writes keys of its next group before all are here


def come_and_go(times: int) -> list[dict[str, Any]]:
    """Return the held resources before and after groups were made and destroyed."""
    use_groups(4)
    before = held()
    dist.barrier()
    use_groups(times)
    until = time.monotonic() + SETTLED
    while (after := held())["descriptors"] > before["descriptors"] and time.monotonic() < until:
        time.sleep(0.05)
    dist.barrier()
    return [before, after]


def own_pair() -> float:
    """Each rank makes only its own group, so torch has the same name for both groups."""
    first = dist.get_rank() // 2 * 2
    group = dist.new_group([first, first + 1], timeout=LIMIT)
    mine = torch.ones(100_000) * (1 + dist.get_rank())
    dist.all_reduce(mine, group=group)
    dist.destroy_process_group(group)
    dist.barrier()
    return mine[-1].item()
