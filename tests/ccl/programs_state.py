"""Collectives that complete on another thread keep the caller's thread-local state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from programs import Groups

Make = Callable[[torch.Tensor], torch.Tensor]
SHAPE = (60, 50)
PEER_LIMIT = timedelta(seconds=30)


def parameter(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(values.clone())


def view_of_parameter(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(values.t().contiguous()).t()


def strided(values: torch.Tensor) -> torch.Tensor:
    return values.t().contiguous().t()


STATES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Make]] = {
    "no_grad, parameter": (torch.no_grad, parameter),
    "no_grad, view of a parameter": (torch.no_grad, view_of_parameter),
    "inference_mode": (torch.inference_mode, torch.clone),
    "inference_mode, strided": (torch.inference_mode, strided),
}


def rows(rank: int, parts: int = 1) -> torch.Tensor:
    """The input of `rank`, with small whole numbers: `parts` blocks of the shape SHAPE."""
    count = parts * SHAPE[0] * SHAPE[1]
    return (torch.arange(count, dtype=torch.float32) % 7 + 10 * rank).reshape(-1, SHAPE[1])


def start(
    kind: str, group: Any, make: Make, early: int
) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """Start the operation; return its work, the tensors that it writes, and their expected values.

    The root is chosen so that the rank `early` has to wait for other ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    late = (early + 1) % size
    backend = group._get_backend(torch.device("cpu"))
    everyone = [rows(r) for r in range(size)]
    total = sum(everyone[1:], everyone[0])
    mine = make(rows(rank))
    parts = [make(rows(rank + r)) for r in range(size)]  # one part for each rank
    blank = make(torch.zeros(SHAPE))
    blanks = [make(torch.zeros(SHAPE)) for _ in range(size)]
    whole = make(torch.zeros(size * SHAPE[0], SHAPE[1]))
    wide = make(rows(rank, size))
    own = slice(rank * SHAPE[0], (rank + 1) * SHAPE[0])
    scattered = sum((rows(rank + r) for r in range(1, size)), rows(rank))
    averaged = sum((rows(r, size)[own] for r in range(1, size)), rows(0, size)[own]) / size
    gathered = torch.cat(everyone)
    asynchronous = {"group": group, "async_op": True}

    def coalesced_average() -> Any:
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = dist.ReduceOp.AVG
        return backend.allreduce_coalesced([mine, blank], options)

    def coalesced_scattered_average() -> Any:
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.AVG
        return group.reduce_scatter_tensor_coalesced([blank], [wide], options)

    average = dist.ReduceOp.AVG
    scaled = dist._make_nccl_premul_sum(0.5)
    operations: dict[str, tuple[Callable[[], Any], list[torch.Tensor], list[torch.Tensor]]] = {
        "all_reduce": (lambda: dist.all_reduce(mine, **asynchronous), [mine], [total]),
        "all_reduce, average": (
            lambda: dist.all_reduce(mine, average, **asynchronous), [mine], [total / size]),
        "all_reduce, scaled": (lambda: dist.all_reduce(mine, scaled, **asynchronous), [mine], [total / 2]),
        "all_reduce, maximum": (
            lambda: dist.all_reduce(mine, dist.ReduceOp.MAX, **asynchronous), [mine], [everyone[-1]]),
        "all_reduce_coalesced": (coalesced_average, [mine, blank], [total / size, torch.zeros(SHAPE)]),
        "reduce": (
            lambda: dist.reduce(mine, early, average, **asynchronous),
            [mine], [total / size if rank == early else everyone[rank]]),
        "broadcast": (lambda: dist.broadcast(mine, late, **asynchronous), [mine], [everyone[late]]),
        "all_gather": (lambda: dist.all_gather(blanks, mine, **asynchronous), blanks, everyone),
        "all_gather_coalesced": (
            lambda: backend.allgather_coalesced([[one] for one in blanks], [mine]), blanks, everyone),
        "all_gather_into_tensor": (lambda: backend._allgather_base(whole, mine), [whole], [gathered]),
        "all_gather_into_tensor_coalesced": (
            lambda: group.allgather_into_tensor_coalesced([whole], [mine]), [whole], [gathered]),
        "gather": (
            lambda: dist.gather(mine, blanks if rank == early else None, early, **asynchronous),
            blanks if rank == early else [], everyone if rank == early else []),
        "scatter": (
            lambda: dist.scatter(blank, parts if rank == late else None, late, **asynchronous),
            [blank], [rows(late + rank)]),
        "reduce_scatter": (lambda: dist.reduce_scatter(blank, parts, **asynchronous), [blank], [scattered]),
        "reduce_scatter, average": (
            lambda: dist.reduce_scatter(blank, parts, average, **asynchronous), [blank], [scattered / size]),
        "reduce_scatter_tensor": (
            lambda: dist.reduce_scatter_tensor(blank, wide, average, **asynchronous), [blank], [averaged]),
        "reduce_scatter_tensor_coalesced": (coalesced_scattered_average, [blank], [averaged]),
        "all_to_all": (
            lambda: dist.all_to_all(blanks, parts, **asynchronous), blanks, [rows(rank + r) for r in range(size)]),
        "all_to_all_single": (
            lambda: backend.alltoall_base(whole, wide, [], []),
            [whole], [torch.cat([rows(r, size)[own] for r in range(size)])]),
        "barrier": (lambda: dist.barrier(**asynchronous), [], []),
    }  # fmt: skip
    begin, outputs, expected = operations[kind]
    return begin(), outputs, expected


def completing_thread(future: Any) -> int:
    """A future's callback: return the thread that runs it.

    It runs on the thread that completes the operation, or in then() if the operation has already completed.
    """
    future.value()  # raises the operation's exception
    return threading.get_ident()


def completes_elsewhere(kind: str, state: str, backend: str, early: int) -> bool:
    """Whether this rank's operation completed on another thread; AssertionError if its result is wrong.

    The rank `early` starts first and waits for the future.  This wait doesn't advance the operation, so the
    background thread has to complete it.
    """
    rank = dist.get_rank()
    group = getattr(Groups, backend)
    store = dist.distributed_c10d._get_default_store()
    key = f"started/{kind}/{state}/{backend}/{early}"
    mode, make = STATES[state]
    if backend == "gloo":  # gloo takes strided memory for contiguous
        make = parameter if "parameter" in state else torch.clone
    if rank != early:
        store.wait([key], PEER_LIMIT)
    with mode():
        work, outputs, expected = start(kind, group, make, early)
    thread = work.get_future().then(completing_thread)
    if rank == early:
        store.set(key, "")
    completed_by = thread.wait()
    with mode():
        for one, other in zip(outputs, expected, strict=True):
            torch.testing.assert_close(one.detach(), other, rtol=0, atol=1e-6, msg=lambda m: f"{kind}: {m}")
    return bool(completed_by != threading.get_ident())
