"""Test programs for sums and averages of all relevant sizes, types and bit patterns."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from programs import FLOATS, Groups


def scaled_sum() -> float:
    tensor = torch.full((4,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.25))
    return tensor[3].item()


def unsigned_averages() -> list[list[int]]:
    """Averages of the numbers 2, 4, … of the ranks, in types that torch can't divide."""
    averages = []
    for kind in (torch.uint16, torch.uint32, torch.uint64):
        tensor = torch.full((3,), 2 + 2 * dist.get_rank()).to(kind)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        averages.append(tensor.tolist())
    return averages


def shm_sums(dtype: str = "bfloat16") -> str:
    """Check several sums in flight, of various lengths and unaligned; return the digest of another sum."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kind = getattr(torch, dtype)
    lengths = (1, 5_000, 20_000, 65_536, 65_539, 200_001, 1_000_003)
    tensors = [(torch.arange(n + 1) % 13 + rank).to(kind)[1:] for n in lengths]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for n, tensor, work in zip(lengths, tensors, works, strict=True):
        work.wait()
        expected = size * (torch.arange(n + 1) % 13)[1:] + size * (size - 1) // 2
        assert torch.equal(tensor, expected.to(kind)), (dtype, n)
    torch.manual_seed(rank)
    noise = torch.randn(300_000).to(kind)
    dist.all_reduce(noise)
    return hashlib.sha256(noise.view(torch.uint8).numpy().tobytes()).hexdigest()


def mixed_coalesced() -> str:
    """Check a coalesced operation on tensors of several lengths and types."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((length,), rank + 1).to(kind) for length in (0, 10, 70_000)
               for kind in (torch.float32, torch.int64, torch.bfloat16)]  # fmt: skip
    options = dist.AllreduceCoalescedOptions()
    Groups.ccl._get_backend(torch.device("cpu")).allreduce_coalesced(tensors, options).wait()
    for tensor in tensors:
        assert (tensor == size * (size + 1) // 2).all(), tensor
    return "ok"


def race() -> str:
    """Run many sums of many pieces.  Each rank has its core, so that ranks get far ahead of others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[rank % len(before)]})
    tensor = torch.empty(1 << 18)
    for i in range(12_000 // size):
        tensor.fill_(i)
        dist.all_reduce(tensor)
    assert (tensor == i * size).all()
    os.sched_setaffinity(0, before)
    return "ok"


def extremes_of_nan() -> str:
    """If any rank has NaN, the minimum and the maximum are NaN."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in FLOATS:
        for count in (7, 100_000):
            for which in range(size):
                for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                    tensor = torch.full(
                        (count,), math.nan if rank == which else 1.0, dtype=getattr(torch, dtype)
                    )
                    dist.all_reduce(tensor, op)
                    assert tensor.isnan().all(), (dtype, count, which, op)
    return "ok"


def every_number_of_16_bits(dtype: str) -> str:
    """Reductions of all numbers of a 16-bit type, even subnormals, infinities and NaNs, have the result that
    torch computes in float32.  The sum of two float16 numbers may overflow although their average doesn't."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kind = getattr(torch, dtype)
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(kind)
    inputs = [every.roll(7919 * other) for other in range(size)]

    def reduced(how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return functools.reduce(how, (one.float() for one in inputs))

    expected = {
        dist.ReduceOp.SUM: reduced(torch.add),
        dist.ReduceOp.AVG: reduced(torch.add) / size,
        dist.ReduceOp.MAX: reduced(torch.maximum),
        dist.ReduceOp.MIN: reduced(torch.minimum),
    }

    def assert_equal(ours: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(
            ours, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )

    for op, wide in expected.items():
        dist.all_reduce(tensor := inputs[rank].clone(), op)
        scattered = torch.empty(every.numel() // size // 2, dtype=kind)
        own = slice(rank * scattered.numel(), (rank + 1) * scattered.numel())
        dist.reduce_scatter_tensor(scattered, inputs[rank][: size * scattered.numel()].clone(), op)
        wanted = wide.to(kind)
        assert_equal(tensor, wanted, f"all_reduce, {op}")
        assert_equal(scattered, wanted[own], f"reduce_scatter, {op}")
        if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            zeroes = wanted == 0
            assert torch.equal(tensor[zeroes].signbit(), wanted[zeroes].signbit()), op
    return "ok"
