"""Throughput and latency of inference: cpulaunch's instances, torch's run_cpu, and one plain Python.

    python scripts/bench/inference.py [--rounds 3] [--model bert] [--instances 1,2] [--precision fp32,bf16]

The programs are those of examples/inference, in every way that is asked for (--precision, --engine).  A
layout is a number of instances, each with as many of the cores.  Each round runs every launcher once, in
turn, so that a busy moment of the machine hits all alike.  Printed for each way and layout: samples/s of all
instances together and the median latency of a batch by each launcher (medians of the rounds), and the
throughput of cpulaunch as a multiple of run_cpu's and of plain Python's, by ratios of the same round (min,
median, max).  Plain Python is one process that may use all cores, whatever the layout.  int8 takes the engine
compile, and torchao; ipex takes torch 2.8 with IPEX, by whose Python this is run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cpulaunch.discovery.this_host import topology_here
from cpulaunch.metric_line import BEGINS, read_metric

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "inference"
TIMEOUT = 1200  # seconds
MODELS = {"bert": "bert.py", "resnet50": "resnet50.py"}


class Found(NamedTuple):
    """Samples per second of all instances, and the median latency of a batch in milliseconds."""

    throughput: float
    latency: float


def main() -> int:
    options = arguments()
    cores = len(topology_here().cores)
    counts = options.instances or sorted({1, max(1, cores // 4), min(2, cores)})
    for model in options.model:
        for precision, engine in ways(options):
            program = [str(EXAMPLES / MODELS[model]), "--precision", precision, "--engine", engine,
                       "--batch", str(options.batch), "--steps", str(options.steps)]  # fmt: skip
            for count in counts:
                title = f"{model}, {precision}, {engine}: {count} x {cores // count} cores"
                for line in compared(title, launchers(program, count, cores // count), options.rounds):
                    print(line, flush=True)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def words(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=words, default=list(MODELS))
    parser.add_argument("--precision", type=words, default=["fp32", "bf16", "int8"])
    parser.add_argument("--engine", type=words, default=["eager", "script", "compile"])
    parser.add_argument("--instances", type=lambda text: [int(word) for word in words(text)])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def ways(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The precisions and engines that go together."""
    for precision in options.precision:
        for engine in options.engine:
            if precision != "int8" or engine == "compile":
                yield precision, engine


def launchers(program: list[str], count: int, cores: int) -> dict[str, list[str]]:
    """Each launcher's name and command."""
    number, each = str(count), str(cores)
    ours = ["-m", "cpulaunch", "run", "--instances", number, "--cores-per-instance", each]
    torchs = ["-m", "torch.backends.xeon.run_cpu", "--ninstances", number, "--ncores-per-instance", each]
    return {
        "cpulaunch": [sys.executable, *ours, *program],
        "run_cpu": [sys.executable, *torchs, *program],
        "python": [sys.executable, *program],
    }


def compared(title: str, commands: dict[str, list[str]], rounds: int) -> Iterator[str]:
    """The lines for one layout."""
    found: dict[str, list[Found]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            found[name].append(figures(command))
    yield f"\n{title}"
    for name, runs in found.items():
        throughput = statistics.median(run.throughput for run in runs)
        latency = statistics.median(run.latency for run in runs)
        yield f"  {name:10} {throughput:10.1f} samples/s  {latency:9.2f} ms a batch"
    for name in ("run_cpu", "python"):
        pairs = zip(found["cpulaunch"], found[name], strict=True)
        ratios = sorted(ours.throughput / theirs.throughput for ours, theirs in pairs)
        yield f"  cpulaunch / {name}: {spread(ratios)}"


def spread(ratios: list[float]) -> str:
    return f"{ratios[0]:.2f} {statistics.median(ratios):.2f} {ratios[-1]:.2f}"


def figures(command: list[str]) -> Found:
    """What the instances of a command have stated together.  Ends the bench where it fails."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(command, cwd=directory, env=os.environ.copy(), text=True, timeout=TIMEOUT,
                              capture_output=True, stdin=subprocess.DEVNULL)  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if BEGINS in line]
    stated = [read_metric(line[line.index(BEGINS) :]) for line in lines]  # after a launcher's prefix
    rates = [one.value for one in stated if one and one.name == "throughput"]
    times = [one.value for one in stated if one and one.name == "latency"]
    if done.returncode or not rates or not times:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return Found(sum(rates), statistics.median(times))


if __name__ == "__main__":
    sys.exit(main())
