"""Compares how long launchers take to run a script that only prints.

    python scripts/bench/startup.py [--rounds 10]            two ranks on this machine
    python scripts/bench/startup.py --hosts [--rounds 10]    two ranks on each of four hosts

Launchers take turns, so that a busy machine affects all of them.  Use the Python of an environment with
impi-rt, torch, accelerate, and cpulaunch, which must not be installed in editable mode, as that starts more
slowly.

On this machine, prints milliseconds from start to end (min, median, max), the ratio of the median to
mpiexec.hydra's and to torchrun's, and the number of greetings: accelerate's ``--num_processes 2`` starts
only one process on a CPU (accelerate#2741).

With ``--hosts``, which needs root, the hosts are network namespaces with a real sshd each, and nodes of a
real Slurm (`tests/support/slurm.py`).  ``CPULAUNCH_TEST_MPICH`` and ``CPULAUNCH_TEST_OPENMPI`` name the
directories of these MPIs' mpiexec.  Prints milliseconds from start to end (min, median, max), and ratios
within a round to the bare program that starts the ranks, and to Intel's mpiexec.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.command import bounded, clean_environment, launcher_options
from support.namespaces import NETWORK
from support.slurm import Queue

BIN = Path(sys.executable).parent
CPULAUNCH = [str(BIN / "cpulaunch"), "run", "-n", "2", "--tee", "all"]
NODES = ("node0", "node1", "node2", "node3")
PER_NODE = 2
FIRST, MPICH, OPENMPI = "mpiexec of Intel MPI", "mpiexec of MPICH", "mpiexec of Open MPI"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hosts", action="store_true")
    options = parser.parse_args()
    print(_cpu_name())
    return on_hosts(options.rounds) if options.hosts else here(options.rounds)


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "?")


# ---- two ranks on this machine


def here(rounds: int) -> int:
    contestants = {
        "mpiexec.hydra": [str(BIN / "mpiexec.hydra"), "-n", "2", sys.executable],
        "cpulaunch, mpirun": [*CPULAUNCH, "--mpi", "intel"],
        "cpulaunch, local": [*CPULAUNCH, "--launcher", "local"],
        "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2"],
    }
    contestants["accelerate launch"] = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "2"]
    times: dict[str, list[float]] = {name: [] for name in contestants}
    greetings: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "hello.py")
        script.write_text("print('hello')\n")
        for number in range(rounds + 1):
            for name, command in contestants.items():
                seconds, greetings[name] = timed([*command, str(script)], directory)
                if number:  # the first round warms the caches
                    times[name].append(seconds)
    raw, torchrun = (statistics.median(times[name]) for name in ("mpiexec.hydra", "torchrun"))
    heads = f"{'2 ranks, ms':20} {'min':>7} {'median':>7} {'max':>7}"
    print(f"{heads}  {'÷ mpiexec':>9} {'÷ torchrun':>10} {'ranks':>6}")
    for name, values in times.items():
        median = statistics.median(values)
        cells = " ".join(f"{1000 * value:7.0f}" for value in (min(values), median, max(values)))
        print(f"{name:20} {cells}  {median / raw:9.2f} {median / torchrun:10.2f} {greetings[name]:6}")
    return 0


def timed(command: list[str], directory: str) -> tuple[float, int]:
    """Return seconds, and the number of ranks that printed a greeting."""
    # Compiled modules may be kept, as they are for users.
    dropped = ("CPULAUNCH_", "PYTHONDONTWRITEBYTECODE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    environment["TMPDIR"] = directory  # torchrun leaves a directory there
    started = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - started
    if done.returncode or "hello" not in done.stdout:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return seconds, done.stdout.count("hello")


# ---- two ranks on each of four hosts


class Contestant(NamedTuple):
    """A command that starts the ranks, and the bare program with which it is compared."""

    argv: list[str]
    bare: str
    env: Mapping[str, str] = {}


def on_hosts(rounds: int) -> int:
    with Queue(("login", *NODES)) as queue, tempfile.TemporaryDirectory() as directory:
        Path(directory, "hello.py").write_text("print('hello', flush=True)\n")
        Path(directory, "hosts").write_text("".join(f"{node}\n" for node in NODES))
        Path(directory, "slots").write_text("".join(f"{node} slots={PER_NODE}\n" for node in NODES))
        with queue.allocation("--nodes=4", "--exclusive") as allocation:
            contestants = _contestants(allocation)
            times: dict[str, list[float]] = {name: [] for name in contestants}
            for number in range(rounds + 1):
                for name, contestant in contestants.items():
                    seconds = _timed_on_hosts(queue, contestant, directory)
                    if number:  # the first round warms the caches
                        times[name].append(seconds)
    print(f"| {len(NODES)} × {PER_NODE} ranks | milliseconds | ÷ the bare program | ÷ {FIRST} |")
    print("|---|---|---|---|")
    for name, contestant in contestants.items():
        cells = [name, " / ".join(f"{1000 * seconds:.0f}" for seconds in _spread(times[name]))]
        for base in (contestant.bare, FIRST):
            ratios = _spread(ours / theirs for ours, theirs in zip(times[name], times[base], strict=True))
            cells.append("–" if base == name else " / ".join(f"{ratio:.2f}" for ratio in ratios))
        print(f"| {' | '.join(cells)} |")
    return 0


def _contestants(allocation: Mapping[str, str]) -> dict[str, Contestant]:
    """Return the bare programs, and cpulaunch with each; with ssh, it is compared with Intel's mpiexec."""
    total = str(len(NODES) * PER_NODE)
    hydra = ["-f", "hosts", "-n", total, "-ppn", str(PER_NODE)]
    # Without these, the MPIs use docker0 to reach the other hosts.
    of_intel = {"I_MPI_HYDRA_BOOTSTRAP": "ssh", "I_MPI_HYDRA_IFACE": "eth0", "I_MPI_HYDRA_RMK": "user"}
    of_mpich = {"HYDRA_LAUNCHER": "ssh", "HYDRA_IFACE": "eth0", "HYDRA_RMK": "user"}
    of_openmpi = {"PRTE_MCA_prte_if_include": str(NETWORK)}
    mpich, openmpi = (os.environ.get(f"CPULAUNCH_TEST_{name}") for name in ("MPICH", "OPENMPI"))
    srun = ["srun", "--overlap", f"--ntasks={total}", "--nodes=4", "--cpu-bind=none", "--mpi=none"]
    bare = {FIRST: Contestant([str(BIN / "mpiexec.hydra"), *hydra], FIRST, of_intel)}
    if mpich:
        bare[MPICH] = Contestant([f"{mpich}/mpiexec.hydra", *hydra], MPICH, of_mpich)
    if openmpi:
        argv = [f"{openmpi}/mpiexec", "--allow-run-as-root", "--bind-to", "none", "--hostfile", "slots"]
        bare[OPENMPI] = Contestant([*argv, "-n", total], OPENMPI, of_openmpi)
    bare["srun"] = Contestant(srun, "srun", allocation)
    ours = {"cpulaunch, ssh": Contestant(_cpulaunch("-f", "hosts", *launcher_options("ssh")), FIRST)}
    for flavour, name in (("intel", FIRST), ("mpich", MPICH), ("openmpi", OPENMPI)):
        if name in bare:
            argv = _cpulaunch("-f", "hosts", *launcher_options(flavour))
            ours[f"cpulaunch, {name}"] = Contestant(argv, name)
    ours["cpulaunch, srun"] = Contestant(_cpulaunch("--launcher", "slurm"), "srun", allocation)
    local = _cpulaunch("--launcher", "local", "-n", total, "--oversubscribe")
    ours[f"cpulaunch, local ({total} ranks on one host)"] = Contestant(local, FIRST)
    with_python = {name: each._replace(argv=[*each.argv, sys.executable]) for name, each in bare.items()}
    return with_python | ours


def _cpulaunch(*options: str) -> list[str]:
    ranks = () if "-n" in options else ("-ppn", str(PER_NODE))
    return [sys.executable, "-m", "cpulaunch", "run", "--tee", "all", *ranks, *options]


def _timed_on_hosts(queue: Queue, contestant: Contestant, directory: str) -> float:
    """Seconds from start to end."""
    # Compiled modules may be kept, as they are for users.
    environ = {k: v for k, v in clean_environment(**contestant.env).items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [*contestant.argv, "hello.py"]
    started = time.perf_counter()
    with bounded(queue.start("login", command, directory=directory, env=environ)) as process:
        out, error = process.communicate()
        seconds = time.perf_counter() - started
    if out.count("hello") != len(NODES) * PER_NODE:
        raise SystemExit(f"{command}: {out}{error}")
    return seconds


def _spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Format the minimum, the median and the maximum."""
    every = list(values)
    return min(every), statistics.median(every), max(every)


if __name__ == "__main__":
    sys.exit(main())
