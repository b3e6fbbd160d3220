"""Throughput and latency of inference: cpulaunch's instances, torch's run_cpu, and one plain Python.

    python scripts/bench/inference.py [--rounds 2] [--model bert] [--instances 1,2] [--precision fp32,bf16]

A model takes about a quarter of an hour on two quiet cores, and IPEX's ways (--engine ipex) a few minutes.
The programs are those of examples/inference, in every way that is asked for (--precision, --engine).  A
layout is a number of instances, each with as many of the cores: by default one with all, and as many as there
are of four cores, or of one where there are fewer than eight.  Plain Python is one process that may use all
cores, for all layouts.  Each round runs all of these once, in turn, so that a busy moment of the machine hits
all alike.  What torch.compile makes is kept after a first run of each, which doesn't count.

A row is a way and layout: samples/s of all instances together by each launcher and the median latency of a
batch in milliseconds (medians of the rounds), the throughput of cpulaunch as a multiple of run_cpu's and of
plain Python's (least, median and largest ratio of a round), and what the precision costs, by the example.
run_cpu is run as in an activated environment, where it finds Intel's OpenMP; it is checked that it binds.
int8 takes the engine compile, and torchao; ipex takes torch 2.8 with IPEX, by whose Python this is run.
"""

from __future__ import annotations

import argparse
import os
import re
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
TIMEOUT = 600  # seconds
MODELS = {"bert": "bert.py", "resnet50": "resnet50.py"}
COSTS = ("accuracy", "accuracy_lost", "difference")
"""What an example states of its results, in per cent or points."""

BOUND = re.compile(r"(numactl -C|taskset -c) \d")
"""How run_cpu says that it binds an instance to cores."""

HEAD = """\
| model, way | layout | cpulaunch | run_cpu | python | their latency, ms | ÷ run_cpu | ÷ python | quality |
|---|---|---|---|---|---|---|---|---|"""


class Found(NamedTuple):
    """Samples per second of all instances, the median latency of a batch in milliseconds, and the quality."""

    throughput: float
    latency: float
    quality: str


def main() -> int:
    options = arguments()
    cores = len(topology_here().cores)
    counts = options.instances or sorted({1, max(1, cores // 4) if cores >= 8 else cores})
    print(HEAD, flush=True)
    for model in options.model:
        for precision, engine in ways(options):
            program = [str(EXAMPLES / MODELS[model]), "--precision", precision, "--engine", engine,
                       "--batch", str(options.batch), "--steps", str(options.steps)]  # fmt: skip
            found = in_turn(launchers(program, counts, cores), options.rounds, unheard=engine == "compile")
            for count in counts:
                way = f"{model}, {precision}, {engine} | {count} x {cores // count}"
                print(f"| {way} | {row(found, count)} |", flush=True)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def words(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", type=words, default=["bert"], help=", ".join(MODELS))
    parser.add_argument("--precision", type=words, default=["fp32", "bf16", "int8"])
    parser.add_argument("--engine", type=words, default=["eager", "script", "compile"])
    parser.add_argument("--instances", type=lambda text: [int(word) for word in words(text)])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    return parser.parse_args()


def ways(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The precisions and engines that go together."""
    for precision in options.precision:
        for engine in options.engine:
            if precision != "int8" or engine == "compile":
                yield precision, engine


Run = tuple[str, int]
"""A launcher's name, and the number of instances; plain Python is one."""


def launchers(program: list[str], counts: list[int], cores: int) -> dict[Run, list[str]]:
    """The command of each launcher and layout."""
    commands = {}
    for count in counts:
        number, each = str(count), str(cores // count)
        ours = ["-m", "cpulaunch", "run", "--instances", number, "--cores-per-instance", each]
        torchs = ["-m", "torch.backends.xeon.run_cpu", "--ninstances", number, "--ncores-per-instance", each]
        commands["cpulaunch", count] = [sys.executable, *ours, *program]
        commands["run_cpu", count] = [sys.executable, *torchs, *program]
    return {**commands, ("python", 1): [sys.executable, *program]}


def in_turn(commands: dict[Run, list[str]], rounds: int, *, unheard: bool) -> dict[Run, list[Found]]:
    """What each has come to in each round; ``unheard``: after one that doesn't count."""
    found: dict[Run, list[Found]] = {run: [] for run in commands}
    with tempfile.TemporaryDirectory() as kept:
        env = {**os.environ, "VIRTUAL_ENV": sys.prefix, "TORCHINDUCTOR_CACHE_DIR": kept}
        for number in range(-unheard, rounds):
            for run, command in commands.items():
                said = figures(command, env, check_bound=run[0] == "run_cpu")
                if number >= 0:
                    found[run].append(said)
    return found


def row(found: dict[Run, list[Found]], count: int) -> str:
    """The cells of one layout."""
    several = found["cpulaunch", count], found["run_cpu", count], found["python", 1]
    ours, torchs, plain = several
    cells = [f"{statistics.median(run.throughput for run in runs):.1f}" for runs in several]
    cells.append(" / ".join(f"{statistics.median(run.latency for run in runs):.1f}" for runs in several))
    cells += [ratios(ours, torchs), ratios(ours, plain), ours[-1].quality]
    return " | ".join(cells)


def ratios(ours: list[Found], theirs: list[Found]) -> str:
    found = sorted(a.throughput / b.throughput for a, b in zip(ours, theirs, strict=True))
    return f"{found[0]:.2f} **{statistics.median(found):.2f}** {found[-1]:.2f}"


def figures(command: list[str], env: dict[str, str], *, check_bound: bool) -> Found:
    """What the instances of a command have stated together.  Ends the bench where it fails."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(command, cwd=directory, env=env, text=True, timeout=TIMEOUT,
                              capture_output=True, stdin=subprocess.DEVNULL)  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if BEGINS in line]
    stated = [read_metric(line[line.index(BEGINS) :]) for line in lines]  # after a launcher's prefix
    by_name: dict[str, list[float]] = {}
    for one in stated:
        if one:
            by_name.setdefault(one.name, []).append(one.value)
    if done.returncode or not {"throughput", "latency"} <= by_name.keys():
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    if check_bound and not BOUND.search(done.stdout + done.stderr):
        raise SystemExit(f"run_cpu has bound nothing to cores; install numactl\n{done.stdout}{done.stderr}")
    quality = [f"{name} {statistics.mean(by_name[name]):.3g}" for name in COSTS if name in by_name]
    return Found(sum(by_name["throughput"]), statistics.median(by_name["latency"]), ", ".join(quality))


if __name__ == "__main__":
    sys.exit(main())
