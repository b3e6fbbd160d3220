"""Compares backends in allreduce and a DDP step: ccl, gloo, Intel's MPI benchmark, and oneccl_bind_pt.

    python scripts/bench/allreduce.py [--rounds 3] [--out runs/allreduce]
    python scripts/bench/allreduce.py --more --only ddp --out runs/allreduce  adds rounds to that file
    python scripts/bench/allreduce.py --only gather  all_gather and reduce_scatter, in place, as FSDP2 does
    python scripts/bench/allreduce.py --only fsdp    a step of FSDP2 of BERT (needs transformers)
    python scripts/bench/allreduce.py --only threads  ranks of two threads beside ranks of one

"ccl, shared" reduces tensors in memory that the ranks share, like DDP's buckets after `prepare` and FSDP2's
buffers.  FSDP2 also runs with torch's backend "fake", which sends nothing and gives a lower bound.
Contenders take turns, so that a busy machine affects all of them, and each ratio is of one round.  Each rank
is pinned to a core, except for "gloo, free".  Prints medians, and ratios as min/median/max over the rounds;
writes OUT.json with every sample.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")
SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]  # bytes
RUN_LIMIT = 400.0  # seconds
TURNS = 7  # with one thread per rank; the same number with two

Samples = dict[str, dict[str, dict[str, list[float]]]]


@dataclass(frozen=True)
class Contender:
    name: str
    backend: str
    pinned: bool = True
    binding: str = "cpulaunch"
    threads: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)


def contenders() -> list[Contender]:
    found = [
        Contender("ccl", "ccl"),
        Contender("ccl, shared", "ccl-shared"),
        Contender("gloo", "gloo"),
        Contender("gloo, free", "gloo", pinned=False),
    ]
    if importlib.util.find_spec("oneccl_bindings_for_pytorch"):
        found.append(Contender("oneccl_bind_pt", "ccl", binding="oneccl_bind_pt"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--only", choices=("allreduce", "ddp", "gather", "fsdp", "threads"))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--more", action="store_true", help="add to the rounds that OUT.json holds")
    parser.add_argument("--out", type=Path, default=Path("allreduce"))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return run_rank(options.rank_of, options.sizes)
    document: Samples = {"allreduce_us": {}, "ddp_ms": {}, "gather_us": {}, "fsdp_ms": {}, "threads_us": {}}
    if options.more:
        document |= json.loads(options.out.with_suffix(".json").read_text())
    for number in range(options.rounds):
        if options.only in (None, "allreduce"):
            bench_allreduce(options, document["allreduce_us"])
        if options.only in (None, "ddp"):
            bench_ddp(options, document["ddp_ms"])
        if options.only == "gather":
            bench_in_turn("gather", options, document["gather_us"])
        if options.only == "fsdp":
            bench_in_turn("fsdp", options, document["fsdp_ms"])
        if options.only == "threads":
            bench_threads(options, document["threads_us"])
        options.out.with_suffix(".json").write_text(json.dumps(document, indent=1))
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    if document["allreduce_us"]:
        print(allreduce_table(document["allreduce_us"]))
    if document["ddp_ms"]:
        print(ddp_table(document["ddp_ms"]))
    if document["gather_us"]:
        print(in_turn_table("all_gather and reduce_scatter", "us", document["gather_us"]))
    if document["fsdp_ms"]:
        print(in_turn_table("FSDP2 of BERT", "ms", document["fsdp_ms"]))
    if document["threads_us"]:
        print(threads_table(document["threads_us"]))
    return 0


# --- the rounds


def bench_allreduce(options: argparse.Namespace, samples: dict[str, dict[str, list[float]]]) -> None:
    """Add one round: contender and type → size → median microseconds of the repetitions."""
    for dtype in options.dtypes:
        for contender in contenders():
            us = start(contender, f"allreduce:{dtype}", options)
            add(samples, f"{contender.name} {dtype}", us)
        if dtype == "float32":  # IMB has no other type
            add(samples, "IMB-MPI1 float32", imb(options))


def bench_ddp(options: argparse.Namespace, samples: dict[str, dict[str, list[float]]]) -> None:
    """Add one round of a DDP step of 8 M parameters, in milliseconds.

    ``ccl-shared`` has its buckets in shared memory, ``ccl-in-turn`` is without overlap, and ``none`` without
    communication.
    """
    for threads in (1, 2):
        for backend in ("ccl", "ccl-shared", "ccl-in-turn", "gloo", "none"):
            name = f"{backend}, {threads} thread{'s' * (threads > 1)}"
            case = Contender(name, backend, threads == 1, threads=threads)
            add(samples, name, start(case, "ddp", options))


def bench_in_turn(task: str, options: argparse.Namespace, samples: dict[str, dict[str, list[float]]]) -> None:
    """Add one round of collectives or steps of FSDP2, with each rank pinned to a core."""
    for backend in ("ccl", "ccl-shared", "gloo", *(["fake"] if task == "fsdp" else [])):
        add(samples, backend, start(Contender(backend, backend), task, options))


def bench_threads(options: argparse.Namespace, samples: dict[str, dict[str, list[float]]]) -> None:
    """Add one round of unpinned ranks, with one thread and with two.

    There are more OpenMP threads than cores, so they sleep while they wait.
    """
    for backend in ("ccl", "ccl-shared"):
        case = Contender(backend, backend, pinned=False, threads=2, variables={"OMP_WAIT_POLICY": "passive"})
        for key, us in start(case, "threads", options).items():
            threads, size = key.split(":")
            add(samples, f"{backend}, {threads}", {size: us})


def add(samples: dict[str, dict[str, list[float]]], name: str, round_: dict[str, float]) -> None:
    for key, value in round_.items():
        samples.setdefault(name, {}).setdefault(key, []).append(value)


def start(contender: Contender, task: str, options: argparse.Namespace) -> dict[str, float]:
    """Run the ranks of one contender, and return what rank 0 measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    processes = []
    for rank in range(options.ranks):
        environment = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
            "WORLD_SIZE": str(options.ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(options.ranks),
            "OMP_NUM_THREADS": str(contender.threads), "CPULAUNCH_RANK_CCL_BINDING": contender.binding,
            **contender.variables,
        }  # fmt: skip
        argv = [
            sys.executable,
            __file__,
            "--rank-of",
            f"{contender.backend}:{task}",
            "--sizes",
            *map(str, options.sizes),
        ]
        if contender.pinned:
            argv = ["taskset", "-c", str(cores[rank % len(cores)]), *argv]
        processes.append(subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        texts = [process.communicate(timeout=RUN_LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise SystemExit(f"{contender.name}, {task}: a rank failed")
    return dict(json.loads(texts[0].splitlines()[-1]))


def imb(options: argparse.Namespace) -> dict[str, float]:
    """If impi-rt is installed, run Intel's benchmark of MPI_Allreduce on the same cores."""
    binaries = Path(sys.prefix) / "bin"
    if not (binaries / "IMB-MPI1").exists():
        return {}
    exponents = [size.bit_length() - 1 for size in options.sizes]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: options.ranks]))
    environment = {
        **os.environ,
        "I_MPI_PIN_PROCESSOR_LIST": cores,
        "I_MPI_FABRICS": "shm",
        "LD_LIBRARY_PATH": f"{sys.prefix}/lib",
    }
    argv = [
        str(binaries / "mpiexec.hydra"),
        "-n",
        str(options.ranks),
        str(binaries / "IMB-MPI1"),
        "Allreduce",
    ]
    argv += ["-npmin", str(options.ranks), "-mem", "2", "-msglog", f"{min(exponents)}:{max(exponents)}"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=RUN_LIMIT)
    rows = re.findall(r"^\s*(\d+)\s+\d+\s+[\d.]+\s+[\d.]+\s+([\d.]+)", done.stdout, re.MULTILINE)
    return {size: float(us) for size, us in rows if int(size) in options.sizes}


# --- in a rank


def run_rank(what: str, sizes: list[int]) -> int:
    backend, task, *rest = what.split(":")
    import torch.distributed as dist

    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo" if backend == "none" else backend.partition("-")[0])
    shared = backend.endswith("-shared")
    measure = {
        "allreduce": lambda: measure_allreduce(rest[0], sizes, shared),
        "ddp": lambda: measure_ddp(backend),
        "gather": lambda: measure_gather(sizes, shared),
        "fsdp": lambda: measure_fsdp(shared),
        "threads": lambda: measure_threads(sizes, shared),
    }
    result = measure[task]()
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()
    return 0


def measure_allreduce(dtype: str, sizes: list[int], shared: bool) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    result = {}
    for size in sizes:
        kind = getattr(torch, dtype)
        tensor = torch.zeros(size // kind.itemsize, dtype=kind)
        if shared:
            share_memory(tensor)
        for _ in range(3):
            dist.all_reduce(tensor)
        times = []
        for _ in range(max(5, min(500, (256 << 20) // size))):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - began)
        result[str(size)] = statistics.median(times) * 1e6
    return result


def measure_threads(sizes: list[int], shared: bool) -> dict[str, float]:
    """Measure all_reduces of float32, with one thread per rank and with two, in turn."""
    import torch
    import torch.distributed as dist

    result = {}
    for size in sizes:
        tensor, times = torch.zeros(size // 4), {1: [], 2: []}
        if shared:
            share_memory(tensor)
        for turn in range(-2, 2 * TURNS):
            threads = 1 + turn % 2
            torch.set_num_threads(threads)
            dist.barrier()
            for _ in range(max(2, min(200, (64 << 20) // size))):
                began = time.perf_counter()
                dist.all_reduce(tensor)
                if turn >= 0:
                    times[threads].append(time.perf_counter() - began)
        for threads, each in times.items():
            result[f"{threads}:{size}"] = statistics.median(each) * 1e6
    return result


def share_memory(tensor: Any) -> None:
    import torch
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).share_memory(tensor)


def measure_ddp(backend: str) -> dict[str, float]:
    import torch

    from cpulaunch.runtime.change.comm_hooks import average_in_place

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU()) for _ in range(8)]
    )
    if backend != "none":
        model = torch.nn.parallel.DistributedDataParallel(model)
    if backend.endswith("-shared"):
        model.register_comm_hook(None, average_in_place)
    if backend.endswith("-in-turn"):
        model.register_comm_hook(None, lambda state, bucket: reduce_in_turn(bucket))  # DDP reads annotations
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 1000)
    times = []
    for step in range(45):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step >= 5:
            times.append(time.perf_counter() - began)
    return {"median": statistics.median(times) * 1e3, "least": min(times) * 1e3}


def reduce_in_turn(bucket: Any) -> Any:
    """A DDP hook without overlap: the computation waits for each bucket's reduction."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def measure_gather(sizes: list[int], shared: bool) -> dict[str, float]:
    """Measure collectives of float32 tensors; the sizes count all ranks' parts together."""
    import torch
    import torch.distributed as dist

    result = {}
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(torch.device("cpu"))
    for size in sizes:
        count = size // 4
        make = partial(backend.allocate_tensor, device=torch.device("cpu")) if shared else torch.empty
        whole, part = make(count, dtype=torch.float32), make(count // group.size(), dtype=torch.float32)
        whole.zero_()
        own = whole.chunk(group.size())[rank]
        calls = {
            "all_gather": partial(dist.all_gather_into_tensor, whole, own),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
        }
        for name, call in calls.items():
            for _ in range(3):
                call()
            times = []
            for _ in range(max(5, min(500, (256 << 20) // size))):
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
            result[f"{name}, {size:,}"] = statistics.median(times) * 1e6
    return result


def measure_fsdp(shared: bool) -> dict[str, float]:
    """Measure steps of BERT, base, with sharded layers, in float32 and in bfloat16."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, result = dist.init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for kind in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model: Any = transformers.BertForSequenceClassification(transformers.BertConfig())
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for module in (model, *model.bert.encoder.layer):
            module.set_allocate_memory_from_process_group_for_comm(shared)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens, labels = torch.randint(30000, (1, 128)), torch.randint(2, (1,))
        times = []
        for step in range(7):
            began = time.perf_counter()
            optimizer.zero_grad()
            model(input_ids=tokens, labels=labels).loss.backward()
            optimizer.step()
            if step >= 2:
                times.append(time.perf_counter() - began)
        result[f"{str(kind).partition('.')[2]}, 128 tokens"] = statistics.median(times) * 1e3
    return result


# --- results


def spread(values: list[float]) -> str:
    """``"2.6/2.9/3.4"``: min, median, max."""
    return f"{min(values):.2f}/{statistics.median(values):.2f}/{max(values):.2f}"


def allreduce_table(us: dict[str, dict[str, list[float]]]) -> str:
    lines = []
    for dtype in DTYPES:
        names = [name for name in us if name.endswith(dtype)]
        if not names:
            continue
        heads = " | ".join(name.rsplit(" ", 1)[0] for name in names)
        lines += ["", f"allreduce, {dtype}, us, medians; ratios min/median/max of the rounds", ""]
        lines += [f"| bytes | {heads} | better gloo ÷ ccl | IMB ÷ ccl | shared ÷ ccl |"]
        lines += ["|---" * (len(names) + 4) + "|"]
        for size, ours in us[f"ccl {dtype}"].items():
            gloos = zip(us[f"gloo {dtype}"][size], us[f"gloo, free {dtype}"][size], strict=True)
            better = spread([min(pair) / mine for pair, mine in zip(gloos, ours, strict=True)])
            imbs = us.get(f"IMB-MPI1 {dtype}", {}).get(size, [])
            of_imb = spread([one / mine for one, mine in zip(imbs, ours, strict=True)]) if imbs else "–"
            cells = [
                f"{statistics.median(us[name][size]):.0f}" if size in us[name] else "–" for name in names
            ]
            in_shared = zip(us[f"ccl, shared {dtype}"][size], ours, strict=True)
            of_shared = spread([one / mine for one, mine in in_shared])
            lines.append(f"| {int(size):,} | {' | '.join(cells)} | {better} | {of_imb} | {of_shared} |")
    return "\n".join(lines)


def ddp_table(ms: dict[str, dict[str, list[float]]]) -> str:
    lines = ["", "DDP step, 8 M parameters, ms: a round's median step, min/median/max of the rounds", ""]
    lines += ["| | ms | gloo ÷ this |", "|---|---|---|"]
    for name, values in ms.items():
        gloo = ms["gloo," + name.partition(",")[2]]["median"]
        ratios = [theirs / mine for theirs, mine in zip(gloo, values["median"], strict=True)]
        lines.append(f"| {name} | {spread(values['median'])} | {spread(ratios)} |")
    return "\n".join(lines)


def in_turn_table(title: str, unit: str, samples: dict[str, dict[str, list[float]]]) -> str:
    lines = ["", f"{title}, {unit}, medians; ratios min/median/max of the rounds", ""]
    pairs = [("gloo", "ccl-shared"), ("ccl-shared", "ccl")] + [("gloo", "fake")] * ("fake" in samples)
    heads = ["", *samples, *(f"{one} ÷ {other}" for one, other in pairs)]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in samples["ccl"]:
        cells = [f"{statistics.median(each[name]):,.0f}" for each in samples.values()]
        for pair in [(samples[one][name], samples[other][name]) for one, other in pairs]:
            cells.append(spread([a / b for a, b in zip(*pair, strict=True)]))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def threads_table(us: dict[str, dict[str, list[float]]]) -> str:
    lines = ["", "allreduce, float32, us, medians; ratios min/median/max of the rounds", ""]
    names = [f"{backend}, {threads}" for backend in ("ccl", "ccl-shared") for threads in (1, 2)]
    heads = [f"{name} thread{'s' * name.endswith('2')}" for name in names]
    lines += [f"| bytes | {' | '.join(heads)} | 2 ÷ 1 | shared, 2 ÷ 1 |", "|---" * 7 + "|"]
    for size in us[names[0]]:
        cells = [f"{statistics.median(us[name][size]):.0f}" for name in names]
        for one, two in (names[:2], names[2:]):
            cells.append(spread([b / a for a, b in zip(us[one][size], us[two][size], strict=True)]))
        lines.append(f"| {int(size):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
