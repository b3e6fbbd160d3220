"""Outages of the network of a job on three hosts: the table of docs/reliability.md.

``scripts/bench/outages.py`` measures them; ``tests/cluster/test_outages.py`` tests a part of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cpulaunch.launchers import MPIS
from support.command import bounded, clean_environment, launcher_options
from support.faults import Cluster
from support.namespaces import until
from support.slurm import Queue

HOSTS = ("node0", "node1", "node2")
LAUNCHERS = (*MPIS, "ssh", "slurm")
OUTAGES, BACKENDS, TIMEOUTS = (5, 15, 25, 60), ("gloo", "ccl"), (30, 120)
START_WITHIN = 90.0
"""Seconds within which the ranks must meet, and within which a job must end after its outage."""

# The ranks reduce until rank 0 finds the file "stop".  Each prints the longest time between two results.
PROGRAM = """\
import os, pathlib, sys, time
import torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
longest, last, step, stop = 0.0, time.monotonic(), 0, False
while not stop:
    values = torch.full((1000,), float(rank + step))
    values[0] = rank == 0 and pathlib.Path("stop").exists()
    dist.all_reduce(values)
    assert values[1:].eq(size * step + size * (size - 1) / 2).all(), (step, values)
    stop, step, now = bool(values[0]), step + 1, time.monotonic()
    if step > 10:
        longest = max(longest, now - last)
    last = now
    if step == 20 and rank == 0:
        pathlib.Path("ready").touch()
    if step % 50 == 0:
        print("step", step, flush=True)
    time.sleep(0.01)
pathlib.Path(f"longest-{rank}").write_text(f"{step} {longest}")
dist.destroy_process_group()
"""


class Survived(NamedTuple):
    """The result of a job.

    ``pause`` is the longest time in seconds between two steps, the same on all ranks; None if the job did not
    end by itself.  ``ended_after``: the seconds from the start of the outage until the launcher's end.
    ``printed`` are the lines that a rank's log should have, ``logged`` the lines that it has.
    """

    exit_code: int
    pause: float | None
    ended_after: float
    stderr: str
    printed: list[str]
    logged: list[str]
    connected_again: int


def run(
    cluster: Cluster,
    directory: Path,
    backend: str,
    options: Sequence[str],
    outage: float,
    timeout: float,
    host: str = "node1",
    env: Mapping[str, str] = {},
) -> Survived:
    """Run a job, and disconnect ``host`` from the network for ``outage`` seconds."""
    (directory / "program.py").write_text(PROGRAM)
    argv = [sys.executable, "-m", "cpulaunch", "run", "--backend", backend, "--precision", "fp32"]
    argv += ["--heartbeat-timeout", str(timeout), "--grace-period", "2", "--stall-timeout", "0", *options]
    argv += ["--tee", "none"]
    argv += ["-ppn", "1", "program.py", backend]
    if "slurm" not in options:
        argv[4:4] = ["-f", cluster.hostfile(directory / "hostfile", HOSTS)]
    else:
        argv[4:4] = ["--hosts", ",".join(HOSTS)]
    began = cluster.start("login", argv, directory=directory, env=clean_environment(**env))
    with bounded(began, 3 * outage + timeout + 2 * START_WITHIN) as launcher:
        until((directory / "ready").exists, "the ranks to meet", START_WITHIN)
        since = time.monotonic()
        deadline = since + outage
        with cluster.cut(host):
            while time.monotonic() < deadline and launcher.poll() is None:
                time.sleep(0.01)
        # Other programs' connections may take the same time again to notice that the network is back.
        healed = time.time()
        while launcher.poll() is None and time.monotonic() < deadline + outage + 10:
            if any(path.stat().st_mtime > healed for path in directory.glob("runs/*/rank-1.log")):
                break
            time.sleep(0.1)
        (directory / "stop").touch()
        _, stderr = launcher.communicate(timeout=outage + timeout + START_WITHIN)
        ended = time.monotonic() - since
    longest = [path.read_text().split() for path in sorted(directory.glob("longest-*"))]
    pause = max(float(each[1]) for each in longest) if len(longest) == len(HOSTS) else None
    (job,) = directory.glob("runs/*/")
    events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    steps = int(longest[0][0]) if longest else 0
    return Survived(
        launcher.returncode,
        pause,
        ended,
        stderr,
        [f"step {number}" for number in range(50, steps + 1, 50)],
        log.read_text().splitlines() if (log := job / "rank-1.log").exists() else [],
        sum(event["type"] == "connected_again" for event in events),
    )


@contextlib.contextmanager
def _cluster(slurm: bool) -> Iterator[Cluster]:
    with Queue(("login", *HOSTS)) if slurm else Cluster(("login", *HOSTS)) as cluster:
        yield cluster


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure outages of a host's network: job by job.")
    parser.add_argument("--outage", type=float, action="append", help=f"seconds; default {OUTAGES}")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: both")
    parser.add_argument("--launcher", choices=LAUNCHERS, action="append", help="default: all")
    parser.add_argument(
        "--timeout", type=float, action="append", help=f"heartbeat_timeout; default {TIMEOUTS}"
    )
    parser.add_argument("--host", default="node1", choices=HOSTS, help="the host that is cut off")
    arguments = parser.parse_args()
    wrong = 0
    for launcher in arguments.launcher or LAUNCHERS:
        with _cluster(launcher == "slurm") as cluster:
            for backend in arguments.backend or BACKENDS:
                for timeout in arguments.timeout or TIMEOUTS:
                    for outage in arguments.outage or OUTAGES:
                        wrong += not _cell(cluster, launcher, backend, timeout, outage, arguments.host)
    return 1 if wrong else 0


def _cell(cluster: Cluster, launcher: str, backend: str, timeout: float, outage: float, host: str) -> bool:
    """Measure one cell of the table, print it, and return whether the job ended as it should."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outage-")))
        env: Mapping[str, str] = {}
        options = ["--launcher", "slurm"] if launcher == "slurm" else launcher_options(launcher)
        if isinstance(cluster, Queue):
            env = stack.enter_context(cluster.allocation(f"--nodes={len(HOSTS)}"))
        result = run(cluster, directory, backend, options, outage, timeout, host, env)
    came = f"exit {result.exit_code} after {result.ended_after:.1f} s"
    if result.pause is not None:
        came = f"goes on; longest pause {result.pause:.1f} s"
    right = result.exit_code == (0 if outage < timeout else 4) or timeout <= outage < 4 / 3 * timeout
    right = right and (result.pause is None or result.printed == result.logged)
    print(
        f"{launcher:8} {backend:5} timeout {timeout:4g} outage {outage:3g}: {came}"
        f"; connected again {result.connected_again}{'' if right else '  WRONG'}",
        flush=True,
    )
    if not right:
        print("".join(f"    {line}\n" for line in result.stderr.splitlines()), flush=True)
    return right
