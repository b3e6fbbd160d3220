"""Measures the time from the kill of a rank to the first step of the next attempt.

    python scripts/bench/restart.py [local] [hosts] [--rounds 5]

``local`` has two ranks on this machine.  ``hosts`` has one rank on each of four hosts, started by Intel
MPI; the hosts are network namespaces with a real sshd each, which need root.  In each round, rank 1 of a
job kills itself after its third step, and the next attempt ends after its first step.  Prints seconds (min,
median, max), and within a round the ratio to the time from the command to the first step.  The script's own
part is the time from its first line to its first step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from support.command import clean_environment  # noqa: E402
from support.faults import Cluster  # noqa: E402
from support.namespaces import why_not  # noqa: E402

HOSTS = ("node0", "node1", "node2", "node3")
LIMIT = 300.0
"""Seconds that one job may take."""

# All hosts have the same clock, as they are one machine.
PROGRAM = """\
import time
began = time.monotonic()
import json, os, signal
import torch, cpulaunch
cpulaunch.init()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = cpulaunch.prepare(model, optimizer)
attempt = int(os.environ["CPULAUNCH_RESTART_COUNT"])
for step in range(1 if attempt else 3):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0:
        stepped = time.monotonic()
        print(json.dumps({"attempt": attempt, "began": began, "stepped": stepped}), flush=True)
if not attempt and cpulaunch.rank() == 1:
    time.sleep(0.5)  # until the others have printed
    print(json.dumps({"killed": time.monotonic()}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0 if attempt else 600)
"""

ROWS = {
    "from the command to the first step": lambda r: r["start"],
    "from the kill to the first step": lambda r: r["again"],
    "the second over the first": lambda r: r["again"] / r["start"],
    "the script's own part of it": lambda r: r["own"],
    "the rest": lambda r: r["again"] - r["own"],
    "of that, until all of the first attempt is gone": lambda r: r["gone"],
    "of that, to ask the hosts, plan and start": lambda r: r["again"] - r["own"] - r["gone"],
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("where", nargs="*", default=["local", "hosts"], metavar="local|hosts")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if "hosts" in options.where and (why := why_not()):
        parser.error(why)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(("login", *HOSTS))) if "hosts" in options.where else None
        rounds: dict[str, list[dict[str, float]]] = {where: [] for where in options.where}
        for number in range(options.rounds + 1):
            for where in options.where:
                measured = one_round(cluster if where == "hosts" else None)
                if number:  # the first round warms the caches
                    rounds[where].append(measured)
    for where, measured in rounds.items():
        print(f"\n| {where}, seconds | min | median | max |\n|---|---|---|---|")
        for row, of in ROWS.items():
            values = [of(each) for each in measured]
            print(f"| {row} | {min(values):.2f} | {statistics.median(values):.2f} | {max(values):.2f} |")
    return 0


def one_round(cluster: Cluster | None) -> dict[str, float]:
    """Return the times of one job, on the cluster or on this machine."""
    with tempfile.TemporaryDirectory(prefix="restart-") as place:
        directory = Path(place)
        (directory / "train.py").write_text(PROGRAM)
        argv = [sys.executable, "-m", "cpulaunch", "run", "--max-restarts", "1", "--tee", "all"]
        argv += ["--backend", "gloo"]
        if cluster:
            hostfile = str(cluster.hostfile(directory / "hosts", HOSTS))
            argv += ["-f", hostfile, "-ppn", "1", "--mpi", "intel", "train.py"]
        else:
            argv += ["-n", "2", "--oversubscribe", "train.py"]
        typed = time.monotonic()
        if cluster:
            job = cluster.start("login", argv, directory=directory, env=clean_environment())
        else:
            pipe = subprocess.PIPE
            job = subprocess.Popen(
                argv, cwd=directory, env=clean_environment(), text=True, stdout=pipe, stderr=pipe
            )
        try:
            stdout, stderr = job.communicate(timeout=LIMIT)
        finally:
            job.kill()
            job.wait()
        if job.returncode:
            raise SystemExit(f"exit code {job.returncode}\n{stdout}{stderr}")
        (events,) = directory.glob("runs/*/events.jsonl")
        return times(typed, list(said(stdout)), [json.loads(line) for line in events.open()])


def said(stdout: str) -> Iterator[dict[str, Any]]:
    """Return the output of the ranks."""
    for line in stdout.splitlines():
        yield json.loads(line.partition("] ")[2])


def times(typed: float, lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> dict[str, float]:
    """Return the times of a job, from its command and its ranks' lines."""
    first = [line for line in lines if line.get("attempt") == 0]
    second = [line for line in lines if line.get("attempt") == 1]
    killed = next(line["killed"] for line in lines if "killed" in line)
    again = max(line["stepped"] for line in second) - killed
    own = max(line["stepped"] for line in second) - min(line["began"] for line in second)
    # Events have seconds since the job's start; the end of a rank has the time of its host's clock (ours).
    (restart,) = (event for event in events if event["type"] == "restart")
    end = next(event for event in events if event["type"] == "exit" and event.get("signal") == 9)
    gone = end["at"] + restart["seconds"] - end["seconds"] - killed
    return {
        "start": max(line["stepped"] for line in first) - typed,
        "again": again,
        "own": own,
        "gone": gone,
    }


if __name__ == "__main__":
    sys.exit(main())
