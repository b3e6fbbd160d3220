"""Measures the cost of many ranks for the launcher, with simulated agents that send real messages.

    python scripts/bench/scale.py [--ranks 64 1024 8192] [--seconds 20] [--local 256 1024]

Prints for each number of ranks: seconds from the launcher's start until all agents are welcome, and until
all have printed ten lines; the launcher's CPU share while only beats arrive, for ``--seconds``; its largest
memory; seconds from a rank's exception until the box that names the rank, and until the launcher's end.
The agents run in four processes on this machine (`scale_agents.py`), which act as an mpiexec with hosts of
eight ranks.

Then prints seconds from start to end, and the launcher's largest memory, for real agents that run ``true``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from watching import spent

AGENTS = Path(__file__).with_name("scale_agents.py")
RUN = (sys.executable, "-m", "cpulaunch", "run")
PROCESSES = 4
RANKS_PER_HOST = 8
LONGEST = 300.0
"""Seconds after which agents count as stuck."""


class Cost(NamedTuple):
    """The results of one job: times in seconds, ``idle`` as a share of a core, ``memory`` in MB."""

    ranks: int
    up: float
    printed: float
    idle: float
    memory: float
    named: float
    ended: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--local", type=int, nargs="*", default=[256, 1024])
    options = parser.parse_args()
    print("ranks  all up, s  all printed, s  idle, % of a core  memory, MB  failure named, s  ended, s")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as directory:
            cost = measure(Path(directory), ranks, options.seconds)
        print(
            f"{cost.ranks:5}  {cost.up:9.1f}  {cost.printed:14.1f}  {100 * cost.idle:17.2f}  "
            f"{cost.memory:10.0f}  {cost.named:16.2f}  {cost.ended:8.2f}",
            flush=True,
        )
    print("local ranks  start to end, s  memory, MB")
    for ranks in options.local:
        with tempfile.TemporaryDirectory() as directory:
            seconds, memory = measure_local(Path(directory), ranks)
        print(f"{ranks:11}  {seconds:15.1f}  {memory:10.0f}", flush=True)
    return 0


def measure_local(directory: Path, ranks: int) -> tuple[float, float]:
    """Return a job's seconds, and its launcher's memory in MB, with real agents that only run ``true``."""
    options = ("-n", str(ranks), "--oversubscribe", "--no-python", "true")
    started = time.monotonic()
    with subprocess.Popen(
        [*RUN, *options], cwd=directory, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        _, status, usage = os.wait4(launcher.pid, 0)
        launcher.returncode = os.waitstatus_to_exitcode(status)
    if launcher.returncode != 0:
        raise SystemExit(f"{ranks} local ranks end with {launcher.returncode}")
    return time.monotonic() - started, usage.ru_maxrss / 1024


def measure(directory: Path, ranks: int, seconds: float) -> Cost:
    """Measure a job of ``ranks`` in an empty directory.  Raises SystemExit if it doesn't end as expected."""
    mpiexec = directory / "mpiexec"
    mpiexec.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(AGENTS))} "$@"\n')
    mpiexec.chmod(0o755)
    hosts = [f"127.1.{number // 250}.{number % 250 + 1}" for number in range(ranks // RANKS_PER_HOST)]
    (directory / "hosts").write_text("".join(f"{host}\n" for host in hosts))
    command = [
        *(*RUN, "--mpi", "mpich", "--mpi-path", str(directory)),
        *("--skip-preflight", "-f", "hosts", "-ppn", str(RANKS_PER_HOST), "--oversubscribe"),
        *("--tee", "none", "--no-python", "true"),
    ]
    started = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, "SCALE_DIRECTORY": str(directory), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            up = wait_for_all(directory, "up", launcher) - started
            printed = wait_for_all(directory, "printed", launcher) - started
            idle = share_of_a_core(launcher, seconds)
            (directory / "fail").touch()
            named, said = until_named(launcher)
            _, _, usage = os.wait4(launcher.pid, 0)
            launcher.returncode = 0
        finally:
            if launcher.returncode is None:
                launcher.terminate()
    ended = time.monotonic()
    if f"rank {ranks // 3} on {hosts[ranks // 3 // RANKS_PER_HOST]} failed first" not in said:
        raise SystemExit(f"the launcher doesn't name rank {ranks // 3}: {said}")
    check_logs(directory, ranks)
    failed = float((directory / "failed").read_text())
    return Cost(ranks, up, printed, idle, usage.ru_maxrss / 1024, named - failed, ended - failed)


def wait_for_all(directory: Path, what: str, launcher: subprocess.Popen[str]) -> float:
    """Return the time when all processes with agents have reported ``what``."""
    deadline = time.monotonic() + LONGEST
    while len(list(directory.glob(f"{what}-*"))) < PROCESSES:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"agents are not {what}: {launcher.stderr.read() if launcher.stderr else ''}")
        time.sleep(0.02)
    return time.monotonic()


def share_of_a_core(launcher: subprocess.Popen[str], seconds: float) -> float:
    """Return the launcher's share of a core while its agents only send beats."""
    time.sleep(2)  # by then, all output is written
    before = spent(str(launcher.pid))
    time.sleep(seconds)
    return 1e-9 * (spent(str(launcher.pid)) - before) / seconds


def until_named(launcher: subprocess.Popen[str]) -> tuple[float, str]:
    """Return the time when the launcher names the failed rank, and its output."""
    assert launcher.stderr
    said, named = "", 0.0
    for line in launcher.stderr:
        said += line
        if re.search(r"rank \d+ on \S+ failed first", line):
            named = time.monotonic()
    return named, said


def check_logs(directory: Path, ranks: int) -> None:
    for rank in range(ranks):
        (log,) = directory.glob(f"runs/*/rank-{rank}.log")
        if log.read_text() != "".join(f"line {line} of rank {rank}\n" for line in range(1, 11)):
            raise SystemExit(f"{log} is not what rank {rank} has printed")


if __name__ == "__main__":
    sys.exit(main())
