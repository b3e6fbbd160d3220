"""Test programs for coalesced operations, and for the information that torch's profiler and hooks get."""

from __future__ import annotations

import json
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from programs import Groups
from torch.distributed.distributed_c10d import _coalescing_manager

CPU = torch.device("cpu")
LENGTHS = (1, 1_000, 300_000)


def _inputs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 1009 + dist.get_rank())
    return [torch.randint(-9, 9, (n,), generator=generator).float() for n in LENGTHS]


def coalesced_reductions() -> str:
    """Coalesced collectives have gloo's results, whether the program waits inside or after the manager."""
    size, gathered_into = dist.get_world_size(), dist.all_gather_into_tensor
    for is_async in (False, True):
        for device in (None, CPU):
            found = []
            for group in (Groups.ccl, Groups.gloo):
                its_device = (
                    device if group is Groups.ccl else None
                )  # gloo can only coalesce tensors by one call
                summed, inputs = _inputs(1), _inputs(2)
                gathered = [torch.empty(size * n) for n in LENGTHS]
                parts = [torch.empty(n) for n in LENGTHS]
                with _coalescing_manager(group, its_device, is_async) as waits:
                    for each in summed:
                        dist.all_reduce(each, group=group)
                _wait(waits, is_async)
                with _coalescing_manager(group, its_device, is_async) as waits:
                    for output, each in zip(gathered, inputs, strict=True):
                        gathered_into(output, each, group=group)
                _wait(waits, is_async)
                with _coalescing_manager(group, its_device, is_async) as waits:
                    for output, each in zip(parts, gathered, strict=True):
                        dist.reduce_scatter_tensor(output, each, group=group)
                _wait(waits, is_async)
                found.append([*summed, *gathered, *parts])
            assert all(map(torch.equal, *found)), (is_async, device)
    return "ok"


def _wait(waits: Any, is_async: bool) -> None:
    if is_async:
        waits.wait()


def coalesced_kinds() -> str:
    """Check that one work has the results of several kinds of collectives.  A second end is an error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = Groups.ccl._get_backend(CPU)
    assert backend.supports_coalescing
    sent, first = torch.full((100_000,), float(rank)), torch.full((7,), float(rank))
    received = torch.empty(size, 3)
    Groups.ccl._start_coalescing(CPU)
    dist.broadcast(sent, 0, async_op=True)
    dist.all_to_all_single(received, torch.full((size, 3), float(rank)), async_op=True)
    dist.broadcast(first, size - 1, async_op=True)
    work = Groups.ccl._end_coalescing(CPU)
    tensors = work.get_future().wait()
    assert work.is_completed()
    assert [each.data_ptr() for each in tensors] == [each.data_ptr() for each in (sent, received, first)]
    assert (sent == 0).all()
    assert (first == size - 1).all()
    assert received[:, 0].tolist() == list(range(size))
    try:
        Groups.ccl._end_coalescing(CPU)
    except RuntimeError as error:
        return str(error)
    return "no error"


def messages_in_a_batch(length: int) -> list[int]:
    """Exchange messages between all ranks in a batch; return the numbers of works of ccl and gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others, counts = [peer for peer in range(size) if peer != rank], []
    for group in (Groups.ccl, Groups.gloo):
        received = {peer: torch.empty(length) for peer in others}
        calls = [
            *(dist.P2POp(dist.isend, torch.full((length,), rank * 10.0 + to), to, group) for to in others),
            *(dist.P2POp(dist.irecv, received[peer], peer, group) for peer in others),
        ]
        works = dist.batch_isend_irecv(calls)
        for work in works:
            work.wait()
        for peer, each in received.items():
            assert (each == peer * 10.0 + rank).all(), (peer, each)
        counts.append(len(works))
    return counts


def a_call_that_fails_within_a_batch() -> tuple[str, int]:
    """Return the error, and how many tensors of later operations are still alive; the group stays usable."""
    message = "no error"
    try:
        with _coalescing_manager(Groups.ccl, CPU, True):
            dist.broadcast(torch.ones(3), 0, async_op=True)
            dist.all_to_all([torch.ones(1)], [torch.ones(1)], async_op=True)
    except ValueError as error:
        message = str(error)
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    summed = torch.ones(1000)
    dist.all_reduce(summed, async_op=True).get_future().wait()
    assert (summed == dist.get_world_size()).all()
    references = []
    for _ in range(10):
        dist.all_reduce(summed := torch.ones(1000))
        references.append(weakref.ref(summed))
    del summed
    dist.barrier()
    end = time.monotonic() + 10
    while any(each() is not None for each in references) and time.monotonic() < end:
        time.sleep(0.01)  # the thread that watches operations drops them a moment later
    return message, sum(each() is not None for each in references)


def completion_hook() -> list[list[Any]]:
    """Return what a completion hook is passed for each operation, before the caller goes on."""
    group = dist.new_group(backend="ccl")
    group._enable_collectives_timing()
    learnt: list[list[Any]] = []

    def hook(info: Any) -> None:
        is_in_order = info.time_started <= info.time_finished
        learnt.append([str(info.op_type), info.seq, is_in_order, info.active_duration.total_seconds() > 0])

    group._register_on_completion_hook(hook)
    try:
        group._register_on_completion_hook(hook)
    except ValueError:
        learnt.append(["a second hook"])
    works = [dist.all_reduce(torch.ones(10_000), group=group, async_op=True)]
    works[0].wait()
    dist.broadcast(torch.ones(3), dist.get_process_group_ranks(group)[0], group=group)
    assert len(learnt) == 3
    works.append(dist.all_reduce(torch.ones(100_000), group=group, async_op=True))
    group._wait_for_pending_works()
    assert len(learnt) == 4
    assert works[0]._get_duration() > 0
    dist.destroy_process_group(group)
    return learnt


def profiled(directory: str) -> list[dict[str, Any]]:
    """The arguments of each event `record_param_comms` that torch's profiler records for collectives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered, numbers = torch.empty(size * 600), torch.ones(600, dtype=torch.float32)
    with torch.profiler.profile(record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(1000, dtype=torch.bfloat16))
        dist.all_gather_into_tensor(gathered, numbers)
        dist.reduce_scatter_tensor(numbers, gathered)
        dist.broadcast(numbers, 1)
        splits = [1] + [2] * (size - 1)
        received = torch.empty(1 if rank == 0 else 2 * size, dtype=torch.int64)
        sent = torch.ones(sum(splits), dtype=torch.int64)
        if rank == 0:
            received = torch.empty(size, dtype=torch.int64)
        dist.all_to_all_single(received, sent, [splits[rank]] * size, splits)
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(5), 1)
        if rank == 1:
            dist.recv(torch.ones(5), 0)
    path = Path(directory) / f"{rank}.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event["args"] for event in events if event["name"] == "record_param_comms"]
