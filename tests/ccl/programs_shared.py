"""Test programs that make and free tensors in memory shared by the ranks of a host."""

from __future__ import annotations

import gc
import mmap
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
    """The number of shared memory blocks that this process maps, and of their files that it has open."""
    gc.collect()
    dist.barrier()  # all ranks have freed their blocks
    dist.all_reduce(torch.ones(1))
    maps = Path("/proc/self/maps").read_text()
    links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return [maps.count("memfd:cpulaunch-ccl"), sum("memfd:cpulaunch-ccl" in link for link in links)]


def made_up(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def shared_sums() -> str:
    """Results of all_reduce have the same bits if some ranks have shared and others ordinary tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, length in enumerate(LENGTHS):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            plain = made_up(length, rank)
            both = torch.cat([plain, torch.zeros(1), plain])  # holds two tensors that use the same storage
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
    """Return the numbers of `blocks` before and after using shared tensors."""
    before = blocks()
    for time in range(times):
        tensor = made_up(LENGTHS[time % len(LENGTHS)], time)
        assert share_memory(tensor)
        assert share_memory(tensor)  # already shared
        dist.all_reduce(tensor)
    del tensor
    return [before, blocks()]


def refusal_of_huge_pages(megabytes: int) -> str:
    """The kernel's error if a process requests huge pages now, or an empty string."""
    with mmap.mmap(-1, megabytes << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(bytes(megabytes << 20))
        try:
            memory.madvise(25)  # MADV_COLLAPSE
        except OSError as error:
            return str(error)
    return ""


def mapped_by_huge_pages(megabytes: int) -> tuple[int, int]:
    """MB of all ranks' shared tensors that this process maps, and how many of them are in huge pages."""
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
    """Whether a group of all ranks, and a group of only this rank, reduce tensors in shared memory."""
    alone = [dist.new_group([rank], backend="ccl") for rank in range(dist.get_world_size())][dist.get_rank()]
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).shares_memory for group in (Groups.ccl, alone)]


def prepared_buckets() -> list[int]:
    """The number of blocks that this rank owns, before and after each step of a prepared model."""
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


def allocated(kind: str, size: int) -> torch.Tensor:
    """A tensor in memory that the group allocates."""
    backend, cpu = Groups.ccl._get_backend(torch.device("cpu")), torch.device("cpu")
    assert backend.supports_tensor_alloc(cpu)
    return backend.allocate_tensor(size, dtype=getattr(torch, kind), device=cpu)


def gathered_and_scattered_in_place() -> str:
    """Collectives of allocated tensors are right, although the tensors change right after the call."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, length in enumerate((1, 16_384, 65_539, 300_001)):
        mine = (rank + number) % 3 > 0  # some ranks use ordinary memory
        whole = allocated("float32", size * length) if mine else torch.empty(size * length)
        own = whole[rank * length : (rank + 1) * length]
        for seed in range(3):
            expected = torch.cat([made_up(length, seed * size + each) for each in range(size)])
            own.copy_(made_up(length, seed * size + rank))
            dist.all_gather_into_tensor(whole, own)
            own.fill_(torch.nan)
            assert torch.equal(whole[: rank * length], expected[: rank * length])
            assert torch.equal(whole[(rank + 1) * length :], expected[(rank + 1) * length :])
            part = allocated("float32", length)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                whole.copy_(made_up(size * length, seed * size + rank))
                inputs = [made_up(size * length, seed * size + each) for each in range(size)]
                total = torch.stack(inputs).double().sum(0)[rank * length : (rank + 1) * length]
                dist.reduce_scatter_tensor(part, whole, op)
                whole.fill_(torch.nan)
                divisor = size if op == dist.ReduceOp.AVG else 1
                torch.testing.assert_close(part.double(), total / divisor, rtol=1e-5, atol=1e-5)
    return "ok"


def scattered_with_the_same_bits() -> str:
    """A sum has the same bits, whichever ranks have allocated their tensors."""
    rank, size, length = dist.get_rank(), dist.get_world_size(), 100_003
    results = []
    for turn in range(3):
        whole = made_up(size * length, rank)
        if turn == 1 or (turn == 2 and rank == 1):
            whole = allocated("float32", size * length).copy_(whole)
        part = torch.empty(length)
        dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG)
        results.append(part)
    assert all(torch.equal(each, results[0]) for each in results)
    return "ok"


def allocated_and_freed(times: int) -> list[list[int]]:
    """Return the numbers of `blocks` before repeated allocations of tensors, after them, and at the end.

    The end of a group frees the blocks that were kept for reuse.
    """
    dist.destroy_process_group(dist.new_group(backend="ccl"))
    before, size, during = blocks(), dist.get_world_size(), set()
    for time in range(times):
        whole = allocated("float32", size * 100_000)
        whole[dist.get_rank() * 100_000 :][:100_000] = time
        dist.all_gather_into_tensor(whole, whole[dist.get_rank() * 100_000 :][:100_000])
        assert (whole == time).all()
        during.add(whole.data_ptr())
        whole.resize_(10)
        del whole
    kept = blocks()
    dist.destroy_process_group(dist.new_group(backend="ccl"))
    return [before, kept, blocks(), [len(during)]]


def not_allocated() -> list[str]:
    """Why these tensors can't be allocated, and whether a group of one rank allocates any."""
    alone = [dist.new_group([rank], backend="ccl") for rank in range(dist.get_world_size())][dist.get_rank()]
    cpu = torch.device("cpu")
    messages = [str(alone._get_backend(cpu).supports_tensor_alloc(cpu))]
    for size, device in ((5, "meta"), (-1, "cpu")):
        try:
            backend = Groups.ccl._get_backend(cpu)
            backend.allocate_tensor(size, dtype=torch.float32, device=torch.device(device))
        except ValueError as error:
            messages.append(str(error))
    small = allocated("float64", 3)
    return [*messages, str(tuple(small.shape)), str(small.dtype)]
