"""Functions that tests run in their ranks: each operation runs with ccl and with gloo on the same input."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=60)
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float64", "float32", "float16", "bfloat16")


class Groups:
    ccl: Any = None
    gloo: Any = None


def start() -> None:
    dist.init_process_group("ccl", timeout=LIMIT)
    Groups.ccl = dist.group.WORLD
    Groups.gloo = dist.new_group(backend="gloo", timeout=LIMIT)


def stop() -> None:
    dist.destroy_process_group()


def hello() -> str:
    return str(dist.get_backend())


def value(seed: int, rank: int, shape: list[int], dtype: str, layout: str = "plain") -> torch.Tensor:
    """The input of `rank`.  It has small whole numbers, which make sums exact and fit into every type."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    kind = getattr(torch, dtype)
    size = [2 * n for n in shape] if layout == "strided" else shape
    if kind.is_complex:
        parts = torch.randint(-4, 5, [*size, 2], generator=generator).to(torch.float64)
        tensor = torch.view_as_complex(parts).to(kind)
    elif kind is torch.bool:
        tensor = torch.randint(0, 2, size, generator=generator).to(kind)
    else:
        low = 0 if dtype.startswith("u") else -3
        tensor = torch.randint(low, 4, size, generator=generator).to(kind)
    if layout == "strided":
        return tensor[tuple(slice(None, None, 2) for _ in shape)]
    return tensor.t() if layout == "transposed" and tensor.dim() == 2 else tensor


def same(name: str, ours: Any, reference: Any, exact: bool = True) -> None:
    ours, reference = ([x] if isinstance(x, torch.Tensor) else x for x in (ours, reference))
    for one, other in zip(ours, reference, strict=True):
        one, other = one.contiguous(), other.contiguous()
        if one.dtype is torch.bool:  # gloo adds bools as bytes
            one, other = one.view(torch.uint8), (other.view(torch.uint8) != 0).to(torch.uint8)
        tolerance = {} if not exact else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(one, other, equal_nan=True, msg=lambda m: f"{name}: {m}", **tolerance)


def gloos(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in a form that gloo reduces correctly: gloo lacks int16, and treats strided memory as
    contiguous."""
    return tensor.int() if tensor.dtype is torch.int16 else tensor.contiguous()


def reduction(
    kind: str, op: str, dtype: str, shape: list[int], layout: str, root: int, seed: int, late: bool
) -> None:
    """Compare all kinds of reductions with gloo's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    root %= size
    reduce_op = getattr(dist.ReduceOp, op)
    results = []
    for group in (Groups.ccl, Groups.gloo):
        reference = group is Groups.gloo
        # gloo lacks AVG, so divide its sum.
        divide = reference and op == "AVG"
        used = dist.ReduceOp.SUM if divide else reduce_op
        as_gloo = gloos if reference else (lambda t: t)
        tensor = as_gloo(value(seed, rank, shape, dtype, layout))
        output: Any = tensor
        if kind == "all_reduce":
            wait(dist.all_reduce(tensor, used, group, async_op=late))
        elif kind == "coalesced":
            output = [
                tensor,
                as_gloo(value(seed + 1, rank, [5], dtype)),
                as_gloo(value(seed + 2, rank, [0], dtype)),
            ]
            if reference:
                for one in output:
                    dist.all_reduce(one, used, group)
            else:
                options = dist.AllreduceCoalescedOptions()
                options.reduceOp = used
                group._get_backend(torch.device("cpu")).allreduce_coalesced(output, options).wait()
        elif kind == "reduce":
            before = tensor.clone()
            if reference:  # gloo's own reduce lacks complex numbers in torch 2.8
                dist.all_reduce(tensor, used, group)
            else:
                wait(dist.reduce(tensor, root, used, group, async_op=late))
            if rank != root:
                output = before if reference else tensor
        elif kind in ("reduce_scatter", "reduce_scatter_uneven"):
            even = kind == "reduce_scatter"
            shapes = [shape if even else [(seed + r) % 4, *shape[1:]] for r in range(size)]
            parts = [as_gloo(value(seed + r, rank, shapes[r], dtype, layout)) for r in range(size)]
            output = torch.empty_like(parts[rank])
            if reference:
                reduced = [part.clone().contiguous() for part in parts]
                for one in reduced:
                    dist.all_reduce(one, used, group)
                output = reduced[rank]
            else:
                wait(dist.reduce_scatter(output, parts, used, group, async_op=late))
        elif kind == "reduce_scatter_tensor":
            whole = as_gloo(value(seed, rank, [size * shape[0], *shape[1:]], dtype))
            output = torch.empty(shape, dtype=whole.dtype)
            if reference:
                dist.all_reduce(whole, used, group)
                output = whole[rank * shape[0] : (rank + 1) * shape[0]]
            else:
                wait(dist.reduce_scatter_tensor(output, whole, used, group, async_op=late))
        if divide and not (kind == "reduce" and rank != root):
            for one in [output] if isinstance(output, torch.Tensor) else output:
                if one.dtype.is_floating_point or one.dtype.is_complex:
                    one.div_(size)
                else:
                    one.div_(size, rounding_mode="trunc")
        kept = [output] if isinstance(output, torch.Tensor) else output
        results.append([one.to(getattr(torch, dtype)) for one in kept])
    exact = size == 2 or dtype in INTEGERS or op in ("MIN", "MAX")
    same(f"{kind} {op} {dtype} {shape} {layout}", *results, exact=exact)


def movement(kind: str, dtype: str, shape: list[int], layout: str, root: int, seed: int, late: bool) -> None:
    """Check all operations that only move data, by gloo's results or, if gloo lacks them, expected values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    root %= size
    group = Groups.ccl
    if kind.startswith("all_gather_in"):
        layout = "plain" if layout == "transposed" else layout  # the output has the rows of the input
    mine = value(seed, rank, shape, dtype, layout)
    every = [value(seed, r, shape, dtype, layout) for r in range(size)]
    blank = torch.zeros_like(mine)
    blanks = [torch.zeros_like(mine) for _ in range(size)]
    expected: Any
    if kind == "broadcast":
        wait(dist.broadcast(mine, root, group, async_op=late))
        output, expected = mine, every[root]
    elif kind == "all_gather":
        wait(dist.all_gather(blanks, mine, group, async_op=late))
        output, expected = blanks, every
    elif kind == "all_gather_uneven":
        sizes = [(seed + r) % 4 for r in range(size)]
        parts = [value(seed, r, [sizes[r], *shape[1:]], dtype) for r in range(size)]
        output, expected = [torch.zeros_like(p) for p in parts], parts
        wait(dist.all_gather(output, parts[rank].contiguous(), group, async_op=late))
    elif kind == "all_gather_into_tensor":
        output = torch.zeros([size * shape[0], *shape[1:]], dtype=mine.dtype)
        wait(dist.all_gather_into_tensor(output, mine.contiguous(), group, async_op=late))
        expected = torch.cat(every)
    elif kind == "all_gather_in_place":
        output = torch.zeros([size * shape[0], *shape[1:]], dtype=mine.dtype)
        slot = output[rank * shape[0] : (rank + 1) * shape[0]]
        slot.copy_(mine)
        wait(dist.all_gather_into_tensor(output, slot, group, async_op=late))
        expected = torch.cat(every)
    elif kind == "gather":
        wait(dist.gather(mine, blanks if rank == root else None, root, group, async_op=late))
        output, expected = (blanks, every) if rank == root else ([], [])
    elif kind == "scatter":
        parts = [value(seed + r, root, shape, dtype, layout) for r in range(size)]
        wait(dist.scatter(blank, parts if rank == root else None, root, group, async_op=late))
        output, expected = blank, parts[rank]
    elif kind == "all_to_all":
        shapes = [
            [[(seed + i * 3 + j) % 4, *shape[1:]] for j in range(size)] for i in range(size)
        ]  # from i to j
        sent = [value(seed + j, rank, shapes[rank][j], dtype) for j in range(size)]
        output = [torch.zeros(shapes[i][rank], dtype=mine.dtype) for i in range(size)]
        wait(dist.all_to_all(output, sent, group, async_op=late))
        expected = [value(seed + rank, i, shapes[i][rank], dtype) for i in range(size)]
    elif kind == "all_to_all_single":
        sent_sizes = [[(seed + i * 3 + j) % 4 for j in range(size)] for i in range(size)]
        received = [sent_sizes[i][rank] for i in range(size)]
        parts = [value(seed, i, [sum(sent_sizes[i]), *shape[1:]], dtype) for i in range(size)]
        output = torch.zeros([sum(received), *shape[1:]], dtype=mine.dtype)
        wait(dist.all_to_all_single(output, parts[rank], received, sent_sizes[rank], group, async_op=late))
        expected = torch.cat([parts[i].split(sent_sizes[i])[rank] for i in range(size)])
    elif kind == "all_to_all_single_equal":
        whole = [value(seed, i, [size * shape[0], *shape[1:]], dtype) for i in range(size)]
        output = torch.zeros_like(whole[rank])
        wait(dist.all_to_all_single(output, whole[rank], group=group, async_op=late))
        expected = torch.cat([w.chunk(size)[rank] if shape[0] else w for w in whole])
    elif kind == "send_recv":
        output, expected = blank.contiguous(), every[(rank - 1) % size]
        sending = dist.isend(mine.contiguous(), (rank + 1) % size, group)
        dist.recv(output, (rank - 1) % size, group)
        sending.wait()
    elif kind == "recv_any":
        output, expected = [], []
        if rank == root:
            for _ in range(size - 1):
                received_tensor = blank.contiguous().clone()
                source = dist.recv(received_tensor, None, group)
                output.append(received_tensor)
                expected.append(every[source])
        else:
            dist.send(mine.contiguous(), root, group)
        dist.barrier(group)
    else:
        raise ValueError(kind)
    same(f"{kind} {dtype} {shape} {layout}", output, expected)


def wait(work: Any) -> None:
    if work is not None:
        work.wait()


def pid() -> int:
    return os.getpid()


def subgroups() -> list[int | None]:
    rank = dist.get_rank()
    members = [[0, 1], [0, 2], [1, 2]]
    groups = [dist.new_group(m, timeout=LIMIT) for m in members]
    sums: list[int | None] = []
    for member, group in zip(members, groups, strict=True):
        value_of_mine = torch.tensor([rank + 1])
        if rank in member:
            dist.all_reduce(value_of_mine, group=group)
        sums.append(int(value_of_mine) if rank in member else None)
    mine = [g for member, g in zip(members, groups, strict=True) if rank in member]
    for group in mine if rank != 1 else mine[::-1]:
        dist.destroy_process_group(group)
    check = torch.ones(5)
    dist.all_reduce(check)
    assert check[0] == 3
    return sums


def pairs() -> str:
    rank = dist.get_rank()
    if rank < 2:
        group = dist.new_group([0, 1], use_local_synchronization=True, timeout=LIMIT)
        mine = torch.ones(3) * rank
        dist.all_reduce(mine, group=group)
        assert mine[0] == 1
        dist.destroy_process_group(group)
    dist.barrier()
    return "ok"


def bitwise() -> list[int]:
    results = []
    for op in (dist.ReduceOp.BOR, dist.ReduceOp.BAND, dist.ReduceOp.BXOR):
        bits = torch.tensor([1 << dist.get_rank()])
        dist.all_reduce(bits, op)
        results.append(int(bits))
    dist.monitored_barrier(timeout=LIMIT) if dist.get_backend() == "gloo" else dist.barrier()
    Groups.ccl._get_backend(torch.device("cpu")).monitored_barrier(LIMIT)
    return results


def many_in_flight() -> str:
    size = dist.get_world_size()
    tensors = [torch.full((1 + 997 * (i % 50),), float(i)) for i in range(200)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for i in reversed(range(200)):
        works[i].wait()
        assert works[i].is_completed()
        assert works[i].is_success()
        assert (tensors[i] == i * size).all()
    return "ok"


def shared_memory() -> tuple[bool, bool]:
    """Whether this rank has mapped the memory for sums within the host, and whether a descriptor of it is open."""
    name = "memfd:cpulaunch-ccl"
    descriptors = list(Path("/proc/self/fd").iterdir())
    links = [os.readlink(one) for one in descriptors if one.is_symlink()]
    return name in Path("/proc/self/maps").read_text(), any(name in link for link in links)


def chained() -> float:
    def again(future: Any) -> torch.Tensor:
        tensor = future.value()[0]
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]  # waits inside a callback

    future = dist.all_reduce(torch.ones(100_000), async_op=True).get_future().then(again)
    return future.wait()[5].item()


def release_the_peer() -> str:
    store = dist.distributed_c10d._get_default_store()
    key = f"go {dist.get_world_size()}"
    if dist.get_rank() == 0:
        work = dist.barrier(async_op=True)
        store.set(key, "")
    else:
        store.wait([key], timedelta(seconds=20))
        work = dist.barrier(async_op=True)
    work.wait()
    store.delete_key(key)
    return "ok"


def misuse() -> list[str]:
    size = dist.get_world_size()
    backend = Groups.ccl._get_backend(torch.device("cpu"))
    options = dist.BroadcastOptions()
    options.rootRank = 9
    attempts = [
        lambda: backend.broadcast([torch.ones(1)], options),
        lambda: backend._allgather_base(torch.ones(size * 2 + 1), torch.ones(2)),
        lambda: backend.alltoall_base(torch.ones(size + 1), torch.ones(size + 1), [], []),
        lambda: backend.allreduce([torch.ones(2, dtype=torch.complex64)], dist.ReduceOp.MAX),
        lambda: backend.allgather([[torch.ones(2)] * (size + 1)], [torch.ones(2)]),
        lambda: backend.reduce_scatter(
            [torch.ones(2)], [[torch.ones(2), *(torch.ones(2).int() for _ in range(size - 1))]]
        ),
        lambda: backend.allreduce_coalesced([torch.ones(2).to_sparse()]),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist._make_nccl_premul_sum(0.5)),
        lambda: dist.all_reduce(torch.ones(1).expand(5)),
        lambda: backend.alltoall_base(torch.ones(size), torch.ones(size * 2), [], []),
    ]
    messages = []
    for attempt in attempts:
        try:
            attempt()
        except (ValueError, RuntimeError, TypeError) as error:
            messages.append(str(error))
    dist.barrier()
    return messages


def wait_while_a_thread_runs() -> str:
    """Rank 0 waits for rank 1, which joins only after another thread of rank 0 has run."""
    store = dist.distributed_c10d._get_default_store()
    key = "a thread has run"
    if dist.get_rank() == 0:
        waiting = threading.Event()

        def tell() -> None:
            waiting.wait(20)
            store.set(key, "")

        thread = threading.Thread(target=tell)
        thread.start()
        work = dist.barrier(async_op=True)
        waiting.set()  # the thread can go on only while the next line has released the GIL
        work.wait()
        thread.join(20)
        store.delete_key(key)
    else:
        store.wait([key], timedelta(seconds=20))
        dist.barrier()
    return "ok"


def repeat(allreduces: int, groups: int) -> dict[str, float]:
    """Return the growth of allocated memory, in MB, after a warm-up of each operation.

    The result is the smallest growth of three rounds of all_reduces. A leak would show in each round, while
    malloc's caches (up to 0.24 MB per thread) grow in only one of them.
    """
    import ctypes

    class Mallinfo(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t) for name in ("arena", *"bcdefg", "uordblks", "fordblks", "keepcost")
        ]

    mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo.restype = Mallinfo

    def allocated() -> float:
        return float(mallinfo().uordblks) / 1e6

    def reduce_often(times: int) -> None:
        for i in range(times):
            work = dist.all_reduce(torch.ones(100), async_op=i % 2 == 0)
            wait(work)

    def group_often(times: int) -> None:
        for _ in range(times):
            group = dist.new_group(timeout=LIMIT)
            dist.all_reduce(torch.ones(10), group=group)
            dist.destroy_process_group(group)

    reduce_often(1000)
    sizes = [allocated()]
    for _ in range(3):
        reduce_often(allreduces)
        sizes.append(allocated())
    grown = {"allreduce": min(after - before for before, after in pairwise(sizes))}
    group_often(10)
    before = allocated()
    group_often(groups)
    grown["groups"] = allocated() - before
    return grown


def large(elements: int) -> str:
    """Check collectives on a tensor with more elements than an int can count."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(elements, dtype=torch.uint8)
    tensor[-1] = rank
    dist.all_reduce(tensor)
    assert tensor[0] == size, tensor[0]
    assert tensor[elements // 2] == size
    assert tensor[-1] == sum(range(size)), tensor[-1]
    tensor.fill_(rank + 1)
    dist.broadcast(tensor, 1)
    assert tensor[0] == tensor[-1] == tensor[elements // 2] == 2
    tensor.fill_(rank + 1)
    gathered = torch.zeros(elements * size, dtype=torch.uint8)
    dist.all_gather_into_tensor(gathered, tensor)
    for other in range(size):
        assert gathered[other * elements] == other + 1
        assert gathered[(other + 1) * elements - 1] == other + 1
    dist.reduce_scatter_tensor(tensor, gathered)
    assert tensor[0] == tensor[-1] == size * (rank + 1), (tensor[0], tensor[-1])
    return "ok"
