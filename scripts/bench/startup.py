"""How long until a script that only prints has run on two ranks: ours against its peers.

    python scripts/bench/startup.py [--rounds 10]

Each round runs every launcher once, in turn, so that a busy moment of the machine hits all alike.
Printed: milliseconds from start to end (min, median, max), and the median as a multiple of raw
mpiexec.hydra's, and of torchrun's.  Run it with the Python of an environment that has cpulaunch
(installed, not editable, as an editable install starts more slowly), impi-rt, torch and accelerate.
The last column counts the greetings: accelerate's ``--num_processes 2`` starts one process on a CPU
(accelerate#2741), and still takes this long.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
CPULAUNCH = [str(BIN / "cpulaunch"), "run", "-n", "2", "--tee", "all"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
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
    """Seconds, and how many ranks said hello."""
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


if __name__ == "__main__":
    sys.exit(main())
