"""Compares the time to get all ranks' stacks: cpulaunch stacks, and py-spy for one rank after the other.

    python scripts/bench/stacks.py [--hosts 4] [--ranks 16] [--rounds 5]

All ranks but one wait in an all_reduce of gloo.  They are spread over network namespaces with a real sshd
each, which need root; with ``--hosts 0``, they run on this machine.  py-spy is started within the
namespaces, without the ssh login that users need.  Prints seconds (min, median, max) for Python's frames
and with --native, and the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.command import bounded, clean_environment
from support.faults import Cluster
from support.namespaces import why_not

LIMIT = 300.0
"""Seconds that the job may take to come up, and each round."""

PROGRAM = """\
import os, socket, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print(socket.gethostname(), os.getpid(), flush=True)
if dist.get_rank():
    dist.all_reduce(torch.ones(4))
time.sleep(3600)
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.hosts and (why := why_not()):
        parser.error(why)
    names = [f"node{number}" for number in range(options.hosts)]
    run = [sys.executable, "-m", "cpulaunch", "run", "--backend", "gloo", "--oversubscribe", "--tee", "all"]
    run += ["--stall-timeout", "0", "-n", str(options.ranks)]
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-stacks-")))
        (directory / "train.py").write_text(PROGRAM)
        environment = clean_environment()
        if names:
            cluster = stack.enter_context(Cluster(tuple(names)))
            run += ["-f", str(cluster.hostfile(directory / "hosts", tuple(names))), "train.py"]
            job = cluster.start("node0", run, directory=directory, env=environment)
        else:
            pipe = subprocess.PIPE
            job = subprocess.Popen(
                [*run, "train.py"], cwd=directory, env=environment, text=True, stdout=pipe, stderr=pipe
            )
        with bounded(job, LIMIT * (1 + 4 * options.rounds)):
            assert job.stdout
            ranks = [job.stdout.readline().split()[-2:] for _ in range(options.ranks)]
            (found,) = directory.glob("runs/*")

            def on(host: str, argv: list[str]) -> list[str]:
                return cluster.command(host, argv, directory) if names else argv

            spy = str(Path(sys.executable).with_name("py-spy"))
            theirs = [on(host, [spy, "dump", "--pid", pid]) for host, pid in ranks]
            ours = on("node0", [sys.executable, "-m", "cpulaunch", "stacks", str(found)])
            measure(ours, theirs, options.rounds)
    return 0


def measure(ours: list[str], theirs: list[list[str]], rounds: int) -> None:
    print(f"{len(theirs)} ranks, s       cpulaunch stacks                        py-spy, in turn")
    for how in ([], ["--native"]):
        mine: list[float] = []
        others: list[float] = []
        for _ in range(rounds):
            mine.append(seconds([[*ours, *how]]))
            others.append(seconds([[*each, *how] for each in theirs]))
        ratio = statistics.median(b / a for a, b in zip(mine, others, strict=True))
        print(f"{' '.join(how) or 'Python alone':12}  {spread(mine)}  {spread(others)}  x {ratio:.2f}")


def seconds(commands: list[list[str]]) -> float:
    """Return the total seconds of these commands, run one after the other."""
    began = time.perf_counter()
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return time.perf_counter() - began


def spread(values: list[float]) -> str:
    return f"min {min(values):.2f}  median {statistics.median(values):.2f}  max {max(values):.2f}"


if __name__ == "__main__":
    sys.exit(main())
