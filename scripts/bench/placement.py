"""Measures what placement gains: seconds of a training step with and without each part of placement.

    python scripts/bench/placement.py [--rounds 5] [--ranks 2] [--only WORD]

The program trains an encoder like BERT with DDP (4 layers of width 768, 8 x 128 tokens per rank, AdamW,
bf16 if the CPU has it).  Contestants take turns, so that a busy machine affects all of them.  Prints
milliseconds of a step (min, median, max), and the ratio to the first contestant of the group in the same
round; above 1, the first is faster.  The environment needs cpulaunch, torch and the built ccl group.
Contestants with tcmalloc, jemalloc or intel-openmp run if these are installed.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cpulaunch.discovery.host.libraries import find_libraries, import_directories, library_directories
from cpulaunch.discovery.host.this_host import topology_here

TRAIN = str(Path(__file__).with_name("placement_train.py"))
TIMEOUT = 300  # seconds

Group = dict[str, tuple[list[str], list[str]]]
"""Contestant → options of ``cpulaunch run``, and of the program."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default="", metavar="WORD", help="the groups in whose title it is")
    options = parser.parse_args()
    for title, group in groups(options.ranks).items():
        if options.only in title:
            print(f"\n{title}\n{heading()}", flush=True)
            for line in compared(group, options.rounds, options.steps):
                print(line, flush=True)
    return 0


def groups(ranks: int) -> dict[str, Group]:
    """Return the groups of contestants.  Contestants are compared with the first of their group."""
    found = find_libraries(library_directories(), import_directories())
    cores = len(topology_here().cores)
    several, one = ["-n", str(ranks)], ["-n", "1"]
    plain = ["--allocator", "default", "--openmp", "default"]
    anywhere = [*plain, "--lenient", "--env", "OMP_PROC_BIND=false"]
    binding: Group = {
        "each on its own cores": ([*several, *plain], []),
        "anywhere": ([*several, *anywhere], ["--anywhere"]),
        "anywhere, threads for all cores": (
            [*several, *anywhere, "--threads", str(cores)],
            ["--anywhere"],
        ),
    }
    allocators: Group = {"libc's malloc": ([*several, *plain], [])}
    runtimes: Group = {"torch's OpenMP, bound": ([*one, *plain], [])}
    runtimes["torch's OpenMP, not bound"] = ([*one, *plain, "--env", "OMP_PROC_BIND=false"], [])
    for name in ("tcmalloc", "jemalloc"):
        if name in found:
            allocators[name] = ([*several, *plain, "--allocator", name], [])
    if "intel" in found:
        intel = [*plain, "--openmp", "intel"]
        runtimes["Intel's OpenMP, bound"] = ([*one, *intel], [])
        runtimes["Intel's OpenMP, not bound"] = ([*one, *intel, "--env", "KMP_AFFINITY=disabled"], [])
    ccl = [*several, *plain, "--backend", "ccl"]
    share = [] if cores > ranks else ["--oversubscribe"]
    workers: Group = {
        "no oneCCL worker": ([*ccl, "--ccl-worker-count", "0"], []),
        f"a worker on {'its own core' if cores > ranks else 'the same core'}": (
            [*ccl, "--ccl-worker-count", "1", *share],
            [],
        ),
    }
    return {
        f"binding, {ranks} ranks": binding,
        f"allocator, {ranks} ranks": allocators,
        "OpenMP runtime, 1 rank on all cores": runtimes,
        f"oneCCL workers, {ranks} ranks": workers,
    }


def heading() -> str:
    return (
        f"{'ms a step':34} {'min':>7} {'median':>7} {'max':>7}   {'ratio: min':>10} {'median':>7} {'max':>7}"
    )


def compared(group: Group, rounds: int, steps: int) -> list[str]:
    """Yield a line for each contestant."""
    times: dict[str, list[float]] = {name: [] for name in group}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(rounds):
            for name, (launcher, program) in group.items():
                times[name].append(
                    1000 * step_seconds(launcher, [*program, "--steps", str(steps)], directory)
                )
    first = next(iter(times.values()))
    lines = []
    for name, values in times.items():
        ratios = [value / other for value, other in zip(values, first, strict=True)]
        cells = " ".join(f"{cell:7.0f}" for cell in (min(values), statistics.median(values), max(values)))
        spread = (min(ratios), statistics.median(ratios), max(ratios))
        lines.append(f"{name:34} {cells}   {spread[0]:10.2f} {spread[1]:7.2f} {spread[2]:7.2f}")
    return lines


def step_seconds(launcher: list[str], program: list[str], directory: str) -> float:
    """Run a job, and return what its rank 0 measured."""
    names = ("CPULAUNCH_", "OMP_", "KMP_", "CCL_", "LD_PRELOAD", "MALLOC_CONF", "GOMP_", "MKL_")
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "run", *launcher, TRAIN, *program],
        cwd=directory,
        env={k: v for k, v in os.environ.items() if not k.startswith(names)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
    )
    said = re.search(r"seconds a step: ([0-9.]+)", done.stdout)
    if done.returncode or not said:
        raise SystemExit(f"{launcher}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return float(said[1])


if __name__ == "__main__":
    sys.exit(main())
