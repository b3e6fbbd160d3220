"""Compares throughput and latency of inference: cpulaunch's instances, torch's run_cpu, and one plain Python.

    python scripts/bench/inference.py [--rounds 30] [--model bert] [--instances 1,2] [--precision fp32,bf16]

The programs are the examples in examples/inference, with each combination of --precision and --engine.  A
combination takes two to five minutes.  A layout is a number of instances that share the cores evenly.  By
default, there are two layouts: one instance with all cores, and instances of four cores (of one core if there
are fewer than eight).  Plain Python is one process that may use all cores.

All programs load their model, and then compute in turns of a second while the others sleep, so that a busy
machine affects all of them (inference_program.py).  Each has one turn in a round.

A row is a combination and a layout.  It has samples/s of all instances together and the median milliseconds
of a batch (medians of the rounds), cpulaunch's throughput ÷ that of run_cpu and of plain Python (first
quartile, **median** and third quartile of the rounds), and the example's measure of the precision's cost.

run_cpu runs as in an activated environment, where it finds Intel's OpenMP; the script checks that it binds.
int8 needs --engine compile and torchao.  For ipex, run the script with the Python of an environment with
torch 2.8 and IPEX.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from inference_program import DIRECTORY, END, LAUNCHERS, NUMBER, PAUSE, POLL, Turns

from cpulaunch.discovery.host.this_host import topology_here
from cpulaunch.metric_line import BEGINS, read_metric

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "inference"
PROGRAM = Path(__file__).parent / "inference_program.py"
READY_WITHIN, ANSWER_WITHIN = 600.0, 60.0  # seconds
MODELS = {"bert": "bert.py", "resnet50": "resnet50.py"}
COSTS = ("accuracy", "accuracy_lost", "difference")
"""What an example states of its results, in per cent or points."""

BOUND = re.compile(r"(numactl -C|taskset -c) \d")
"""How run_cpu says that it binds an instance to cores."""

HEAD = """\
| model, way | layout | cpulaunch | run_cpu | python | their latency, ms | ÷ run_cpu | ÷ python | quality |
|---|---|---|---|---|---|---|---|---|"""


def main() -> int:
    options = arguments()
    cores = len(topology_here().cores)
    counts = options.instances or sorted({1, max(1, cores // 4) if cores >= 8 else cores})
    print(HEAD, flush=True)
    for model in options.model:
        for precision, engine in ways(options):
            example = str(EXAMPLES / MODELS[model])
            program = [str(PROGRAM), example, "--precision", precision, "--engine", engine,
                       "--batch", str(options.batch), "--steps", str(options.steps)]  # fmt: skip
            found = in_turn(launchers(program, counts, cores), options.batch, options.rounds, options.seconds)
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

    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--model", type=words, default=["bert"], help=", ".join(MODELS))
    parser.add_argument("--precision", type=words, default=["fp32", "bf16", "int8"])
    parser.add_argument("--engine", type=words, default=["eager", "script", "compile"])
    parser.add_argument("--instances", type=lambda text: [int(word) for word in words(text)])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="batches, over and over")
    return parser.parse_args()


def ways(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the combinations of precision and engine that work."""
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


class Found(NamedTuple):
    """Samples/s of all instances and the median latency of a batch in milliseconds, for each round."""

    throughput: list[float]
    latency: list[float]
    quality: str


def in_turn(commands: dict[Run, list[str]], batch: int, rounds: int, seconds: float) -> dict[Run, Found]:
    """Run the commands in turn; return the results of each.  A failed command ends the benchmark."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        turns = Turns(directory, create=True)
        started: list[Launched] = []
        stack.callback(end_all, turns, started)
        for number, (run, command) in enumerate(commands.items()):
            one = Launched(number, run[1], command, directory, len(commands))
            started.append(one)
            one.await_ready()
        for turn in range(rounds * len(started)):
            turns.now = turn
            time.sleep(seconds)
            turns.now = PAUSE
            started[turn % len(started)].await_turn(turn, batch)
        end_all(turns, started)
        by_run = dict(zip(commands, started, strict=True))
        return {run: one.found(check_bound=run[0] == "run_cpu") for run, one in by_run.items()}


def end_all(turns: Turns, started: list[Launched]) -> None:
    turns.now = END
    for one in started:
        one.end()


class Launched:
    """A launcher whose ``count`` programs wait for their turns."""

    def __init__(self, number: int, count: int, command: list[str], directory: Path, launchers: int) -> None:
        self._number, self._count, self._command, self._directory = number, count, command, directory
        self._output = directory / f"output-{number}"
        (own := directory / f"work-{number}").mkdir()
        turns = {DIRECTORY: str(directory), NUMBER: str(number), LAUNCHERS: str(launchers)}
        env = {**os.environ, **turns, "VIRTUAL_ENV": sys.prefix}
        env["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "compiled")
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=own, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._throughput: list[float] = []
        self._latency: list[float] = []

    def await_ready(self) -> None:
        self._await(READY_WITHIN, "ready")

    def await_turn(self, turn: int, batch: int) -> None:
        """Wait for the results of the programs in this turn, and record them."""
        each = [json.loads(line)[1] for line in self._await(ANSWER_WITHIN, f"[{turn}, ")]
        if not all(each):
            raise SystemExit("a program has done no batch in its turn: take more --seconds")
        self._throughput.append(sum(batch * len(seconds) / sum(seconds) for seconds in each))
        self._latency.append(1000 * statistics.median(one for seconds in each for one in seconds))

    def _await(self, within: float, begin: str) -> list[str]:
        """Wait until the last line of each program begins with ``begin``; return these lines."""
        until = time.monotonic() + within
        while True:
            files = self._directory.glob(f"{self._number}.*")
            last = [(file.read_text().splitlines(keepends=True) or [""])[-1] for file in files]
            if len(last) == self._count and all(line.startswith(begin) and line[-1] == "\n" for line in last):
                return last
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(self._command)}\n{self._output.read_text()}")
            time.sleep(POLL)

    def end(self) -> None:
        """Wait until the launcher has ended; kill it if that takes too long."""
        try:
            self._process.wait(ANSWER_WITHIN)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def found(self, *, check_bound: bool) -> Found:
        said = self._output.read_text()
        if self._process.returncode:
            raise SystemExit(f"{' '.join(self._command)}\n{said}")
        if check_bound and not BOUND.search(said):
            raise SystemExit(f"run_cpu has bound nothing to cores; install numactl\n{said}")
        lines = [line for line in said.splitlines() if BEGINS in line]
        stated = [read_metric(line[line.index(BEGINS) :]) for line in lines]  # after a launcher's prefix
        values = {name: [one.value for one in stated if one and one.name == name] for name in COSTS}
        quality = [f"{name} {statistics.mean(several):.3g}" for name, several in values.items() if several]
        return Found(self._throughput, self._latency, ", ".join(quality))


def row(found: dict[Run, Found], count: int) -> str:
    """Return the table's cells for one layout."""
    several = found["cpulaunch", count], found["run_cpu", count], found["python", 1]
    ours, torchs, plain = several
    cells = [f"{statistics.median(run.throughput):.1f}" for run in several]
    cells.append(" / ".join(f"{statistics.median(run.latency):.1f}" for run in several))
    cells += [ratios(ours, torchs), ratios(ours, plain), ours.quality]
    return " | ".join(cells)


def ratios(ours: Found, theirs: Found) -> str:
    found = [a / b for a, b in zip(ours.throughput, theirs.throughput, strict=True)]
    below, median, above = statistics.quantiles(found, method="inclusive")
    return f"{below:.2f} **{median:.2f}** {above:.2f}"


if __name__ == "__main__":
    sys.exit(main())
