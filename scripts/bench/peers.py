"""Compares what a script on two local ranks gets from cpulaunch and from other launchers (README.md).

    python scripts/bench/peers.py [--output]

Each launcher runs two scripts.  In the first, every rank reports the CPUs that it may use, its numbers of
threads, and the backend that ``init_process_group()`` without arguments takes.  In the second, rank 1 prints
an error and exits with 5 while rank 0 computes for 20 s.  For the second script, the bench prints the
launcher's exit code, the seconds until it ended, the number of processes that were left behind, and whether
its output has the error and names the rank; ``--output`` prints the output itself.

Run it with the Python of an environment that has cpulaunch, impi-rt, torch, accelerate and, for Ray Train,
``ray[train]``.  ``scripts/bench/startup.py`` measures the start-up.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

BIN = Path(sys.executable).parent
MARK = f"PEERS_BENCH={os.getpid()}"  # in the environment of every process that a launcher starts
TIMEOUT = 240.0  # Ray needs a minute and more on a busy machine

REPORT = """\
import os, torch, torch.distributed as dist
try:
    if not dist.is_initialized():  # Ray has made the group
        dist.init_process_group()
    group = dist.get_backend_config()
except ValueError as error:
    group = str(error).split(": ")[-1]
cpus, omp = sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
print(f"REPORT CPUs {cpus}, OMP_NUM_THREADS={omp}, threads: {torch.get_num_threads()}, backend: {group}")
"""
FAIL = """\
import os, sys, time
if (os.environ.get("RANK") or os.environ.get("PMI_RANK")) == "1":
    time.sleep(0.5)
    print("shard-1.npz is missing", file=sys.stderr)
    sys.exit(5)
end = time.monotonic() + 20
while time.monotonic() < end:
    pass
"""
RAY = """\
import os, runpy, sys
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
script, two = os.path.abspath(sys.argv[1]), ScalingConfig(num_workers=2)
TorchTrainer(runpy.run_path, train_loop_config=script, scaling_config=two).fit()
"""
ACCELERATE = ["accelerate", "launch", "--cpu", "--num_processes", "2"]
COMMANDS = (
    ["cpulaunch", "run", "-n", "2"],
    ["cpulaunch", "run", "-n", "2", "--mpi", "intel"],
    ["torchrun", "--nproc-per-node", "2"],
    ACCELERATE,
    [*ACCELERATE, "--mpirun_hostfile", "hosts"],
    ["mpiexec.hydra", "-n", "2", "python"],
    ["python", "ray_train.py"],
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", action="store_true", help="print what the launchers print of the failure")
    show_output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "report.py").write_text(REPORT)
        Path(directory, "fail.py").write_text(FAIL)
        Path(directory, "ray_train.py").write_text(RAY)
        Path(directory, "hosts").write_text("localhost\n")
        for command in COMMANDS:
            if command[1] == "ray_train.py" and find_spec("ray") is None:
                continue
            print(f"$ {' '.join(command)} train.py")
            _, output, _ = run([*command, "report.py"], directory)
            for line in re.findall(r"REPORT (.*)", output) or ["no rank reported"]:
                print(f"  {line}")
            started = time.monotonic()
            code, output, left = run([*command, "fail.py"], directory)
            seconds = time.monotonic() - started
            print(f"  rank 1 fails: exit code {code} after {seconds:.1f} s, {left} processes left", end="")
            named = re.search(r"rank\W{0,9}1\b", output, re.I) is not None
            print(f"; error shown: {'shard-1.npz' in output}, rank named: {named}", flush=True)
            if show_output:
                print("\n".join(f"  | {line}" for line in output.splitlines()))
    return 0


def run(command: list[str], directory: str) -> tuple[int, str, int]:
    """Return the exit code (-9 after TIMEOUT), stdout and stderr, and how many processes were left behind."""
    dropped = ("CPULAUNCH_", "OMP_", "PMI_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= dict([MARK.split("=")], TMPDIR=directory, PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        left = kill_marked_processes()
        output.seek(0)
        return process.returncode, output.read(), left


def kill_marked_processes() -> int:
    """Kill the processes that a launcher has left behind; return their number."""
    killed = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if MARK.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                killed += 1
        except OSError:  # the process has ended, or belongs to somebody else
            pass
    return killed


if __name__ == "__main__":
    sys.exit(main())
