"""Allreduce and a DDP step: ccl, gloo (pinned and not), Intel's MPI benchmark, oneccl_bind_pt where it is.

    python scripts/bench/allreduce.py [--rounds 3] [--out runs/allreduce]

The contenders take turns, so that a busy machine hurts them alike.  Each rank is pinned to one core (but
"gloo, free").  Prints microseconds and ratios, writes OUT.json, and OUT.png where matplotlib is installed.
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
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]  # bytes
RUN_LIMIT = 300.0  # seconds


@dataclass(frozen=True)
class Contender:
    name: str
    backend: str
    pinned: bool = True
    binding: str = "cpulaunch"
    threads: int = 1


def contenders() -> list[Contender]:
    found = [
        Contender("ccl", "ccl"),
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
    parser.add_argument("--only", choices=("allreduce", "ddp"))
    parser.add_argument("--out", type=Path, default=Path("allreduce"))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return run_rank(options.rank_of, options.sizes)
    document: dict[str, Any] = {"ranks": options.ranks, "rounds": options.rounds}
    if options.only != "ddp":
        document["allreduce_us"] = bench_allreduce(options)
        print(allreduce_table(document["allreduce_us"]))
    if options.only != "allreduce":
        document["ddp_ms"] = bench_ddp(options)
        print(ddp_table(document["ddp_ms"]))
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1))
    if "allreduce_us" in document:
        draw(document["allreduce_us"], options.out.with_suffix(".png"))
    return 0


# --- the rounds


def bench_allreduce(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Contender and type → size → median over rounds of a round's median, in microseconds."""
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(options.rounds):
        for contender in contenders():
            for dtype in ("float32", "bfloat16"):
                task = f"allreduce:{dtype}"
                for size, us in start(contender, task, options).items():
                    samples[f"{contender.name} {dtype}"][size].append(us)
        for size, us in imb(options).items():
            samples["IMB-MPI1 float32"][size].append(us)
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    return {
        name: {size: statistics.median(all_) for size, all_ in by.items()} for name, by in samples.items()
    }


def bench_ddp(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """A DDP step of 8 M parameters, in milliseconds; its least of all rounds, which a busy machine spares."""
    cases = []
    for threads in (1, 2):
        for backend in ("ccl", "gloo", "none"):
            name = f"{backend}, {threads} thread{'s' * (threads > 1)}"
            cases.append(Contender(name, backend, threads == 1, threads=threads))
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(options.rounds):
        for case in cases:
            for key, ms in start(case, "ddp", options).items():
                samples[case.name][key].append(ms)
    return {name: {key: min(all_) for key, all_ in by.items()} for name, by in samples.items()}


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
            "OMP_NUM_THREADS": str(contender.threads), "CPULAUNCH_CCL_BINDING": contender.binding,
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
    return dict(json.loads(texts[0].splitlines()[-1]))


def imb(options: argparse.Namespace) -> dict[str, float]:
    """Intel's own benchmark of MPI_Allreduce on the same cores, where impi-rt is installed."""
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

    if backend == "none":
        dist.init_process_group("gloo")
    else:
        dist.init_process_group(backend)
    result = measure_allreduce(rest[0], sizes) if task == "allreduce" else measure_ddp(backend)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()
    return 0


def measure_allreduce(dtype: str, sizes: list[int]) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    result = {}
    for size in sizes:
        kind = getattr(torch, dtype)
        tensor = torch.zeros(size // kind.itemsize, dtype=kind)
        for _ in range(3):
            dist.all_reduce(tensor)
        times = []
        for _ in range(max(5, min(500, (256 << 20) // size))):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - began)
        result[str(size)] = statistics.median(times) * 1e6
    return result


def measure_ddp(backend: str) -> dict[str, float]:
    import torch

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU()) for _ in range(8)]
    )
    if backend != "none":
        model = torch.nn.parallel.DistributedDataParallel(model)
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


# --- what came out


def allreduce_table(us: dict[str, dict[str, float]]) -> str:
    lines = []
    for dtype in ("float32", "bfloat16"):
        names = [name for name in us if name.endswith(dtype)]
        heads = " | ".join(name.rsplit(" ", 1)[0] for name in names)
        lines += ["", f"allreduce, {dtype}, us; medians", ""]
        lines += [f"| bytes | {heads} | better gloo ÷ ccl | IMB ÷ ccl |", "|---" * (len(names) + 3) + "|"]
        for size in us[f"ccl {dtype}"]:
            ours = us[f"ccl {dtype}"][size]
            gloo = min(us[f"gloo {dtype}"][size], us[f"gloo, free {dtype}"][size])
            imb_us = us.get(f"IMB-MPI1 {dtype}", {}).get(size)
            cells = [f"{us[name][size]:.0f}" if size in us[name] else "–" for name in names]
            ratio = f"{imb_us / ours:.2f}" if imb_us else "–"
            lines.append(f"| {int(size):,} | {' | '.join(cells)} | {gloo / ours:.1f} | {ratio} |")
    return "\n".join(lines)


def ddp_table(ms: dict[str, dict[str, float]]) -> str:
    lines = ["", "DDP step, 8 M parameters, ms; least median, and least, of all rounds", ""]
    lines += ["| | median | least |", "|---|---|---|"]
    lines += [f"| {name} | {values['median']:.1f} | {values['least']:.1f} |" for name, values in ms.items()]
    for threads in ("1 thread", "2 threads"):
        ratio = ms[f"gloo, {threads}"]["median"] / ms[f"ccl, {threads}"]["median"]
        lines.append(f"\n{threads} a rank: gloo ÷ ccl = {ratio:.2f}")
    return "\n".join(lines)


def draw(us: dict[str, dict[str, float]], path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no {path.name}: matplotlib is not installed", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, by_size in us.items():
        if name.endswith("float32"):
            axes.loglog(
                [int(size) for size in by_size], list(by_size.values()), "o-", label=name.rsplit(" ", 1)[0]
            )
    axes.set_xlabel("bytes, float32")
    axes.set_ylabel("µs")
    axes.set_title("Allreduce within a host")
    axes.legend()
    axes.grid(True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
