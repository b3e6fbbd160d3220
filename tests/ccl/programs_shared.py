"""Test programs that make and free tensors in memory shared by the ranks of a host."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from programs import Groups

LENGTHS = (1, 5_000, 65_539, 1_000_003)


def share_memory(tensor: torch.Tensor) -> bool:
    return bool(Groups.ccl._get_backend(torch.device("cpu")).share_memory(tensor))


def blocks() -> list[int]:
    """The number of blocks of shared memory that this process has mapped, and the number of their files that
    it has open."""
    gc.collect()
    dist.barrier()  # all ranks have freed their blocks
    dist.all_reduce(torch.ones(1))
    maps = Path("/proc/self/maps").read_text()
    links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return [maps.count("memfd:cpulaunch-ccl"), sum("memfd:cpulaunch-ccl" in link for link in links)]


def made_up(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def shared_sums() -> str:
    """Sums and averages have the same bits, although the ranks' tensors are in different kinds of memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, length in enumerate(LENGTHS):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            plain = made_up(length, rank)
            both = torch.cat([plain, torch.zeros(1), plain])  # tensors on one storage
            first, second = both[:length], both[length + 1 :]
            if (rank + number) % 3:
                assert share_memory(second)
            works = [dist.all_reduce(one, op, async_op=True) for one in (first, plain, second)]
            for work in works:
                work.wait()
            assert torch.equal(first, plain), (length, op)
            assert torch.equal(second, plain), (length, op)
            assert both[length] == 0
            if op == dist.ReduceOp.MAX:
                assert torch.equal(
                    plain, torch.stack([made_up(length, each) for each in range(size)]).amax(0)
                )
    return "ok"


def shared_and_freed(times: int) -> list[list[int]]:
    """The mappings and open files before and after using shared tensors."""
    before = blocks()
    for time in range(times):
        tensor = made_up(LENGTHS[time % len(LENGTHS)], time)
        assert share_memory(tensor)
        assert share_memory(tensor)  # it is already
        dist.all_reduce(tensor)
    del tensor
    return [before, blocks()]


def mapped_by_huge_pages(megabytes: int) -> tuple[int, int]:
    """MB that this process maps of all ranks' shared tensors, and MB of these that are in huge pages."""
    tensor = torch.ones(megabytes << 18)
    share_memory(tensor)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor)  # each rank has read, and therefore mapped, its part of the others' tensors
    maps = re.findall(r"memfd:cpulaunch-ccl.*?(?=VmFlags)", Path("/proc/self/smaps").read_text(), re.DOTALL)
    large = [one for one in maps if int(re.search(r"Size: *(\d+)", one)[1]) >= megabytes << 10]
    return tuple(
        sum(int(re.search(rf"{key}: *(\d+)", one)[1]) for one in large) >> 10
        for key in ("Size", "ShmemPmdMapped")
    )


def shared_and_forked() -> str:
    """A forked child frees its copy of the tensor without affecting the parent."""
    tensor = torch.full((100_000,), dist.get_rank() + 1.0)
    share_memory(tensor)
    dist.all_reduce(tensor)
    if (child := os.fork()) == 0:
        del tensor
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    tensor.fill_(1.0)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()
    return "ok"


def shares_memory() -> list[bool]:
    """Whether a group of all ranks, and a group of this rank alone, reduces tensors in place."""
    alone = [dist.new_group([rank], backend="ccl") for rank in range(dist.get_world_size())][dist.get_rank()]
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).shares_memory for group in (Groups.ccl, alone)]


def prepared_buckets() -> list[int]:
    """The number of this rank's own blocks, before and after each step of a prepared model."""
    import cpulaunch

    before = blocks()[1]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 100))
    plain = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 100))
    plain.load_state_dict(model.state_dict())
    model = cpulaunch.prepare(model)
    held = [0]
    for step in range(4):
        for one in (model, plain):
            one.zero_grad()
            one(made_up(1600, step).view(16, 100)).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)  # all ranks have the same batch
        held.append(blocks()[1] - before)
    return held


def prepared_with_own_hook() -> list[Any]:
    """The number of calls of the script's communication hook in a step, the gradient, and the error of a
    second hook."""
    import cpulaunch

    calls: list[str] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with classes
        state.append("called")
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().fill_(7.0))
        return done

    model = cpulaunch.prepare(torch.nn.Linear(3, 3))
    model.register_comm_hook(calls, hook)
    model(torch.ones(2, 3)).sum().backward()
    try:
        model.register_comm_hook(calls, hook)
    except RuntimeError as error:
        return [calls, next(model.parameters()).grad[0, 0].item(), str(error)]
    return []


def not_shared() -> list[str]:
    """The reasons why these tensors can't be shared."""
    messages = []
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        try:
            share_memory(tensor)
        except ValueError as error:
            messages.append(str(error))
    return [*messages, str(share_memory(torch.empty(0)))]
