"""Compares the start of four ranks on four nodes: cpulaunch with srun, and bare srun.

    python scripts/bench/srun.py [--rounds 10]

Both run in turn in one allocation of the test suite's Slurm (`tests/support/slurm.py`), which needs root,
with a script that only prints and with one that imports torch first.  Prints milliseconds from the start to
the first line of any rank, and to the end (min, median, max), and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.command import bounded, clean_environment
from support.slurm import Queue

NODES = ("node0", "node1", "node2", "node3")
SCRIPTS = {
    "hello.py": "print('hello', flush=True)\n",
    "imports_torch.py": "import torch\nprint('hello', flush=True)\n",
}
BARE = ["srun", "--overlap", "--ntasks=4", "--nodes=4", "--cpu-bind=none", "--mpi=none", sys.executable]
# With gloo, ranks have all cores of their nodes, as under srun.  With ccl, each would leave a core free.  As
# the nodes are one machine with two cores, that would be the same core, and all ranks would share the other.
CPULAUNCH = [sys.executable, "-m", "cpulaunch", "run", "--launcher", "slurm", "-ppn", "1", "--tee", "all",
             "--backend", "gloo"]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    contestants = {
        "srun": BARE,
        "cpulaunch": CPULAUNCH,
        "cpulaunch --skip-preflight": [*CPULAUNCH, "--skip-preflight"],
    }
    with Queue(("login", *NODES)) as queue, tempfile.TemporaryDirectory() as directory:
        for script, text in SCRIPTS.items():
            (Path(directory) / script).write_text(text)
        with queue.allocation("--nodes=4", "--exclusive") as allocation:
            times = {script: dict[str, list[tuple[float, float]]]() for script in SCRIPTS}
            for number in range(rounds + 1):
                for script, (name, command) in product(SCRIPTS, contestants.items()):
                    taken = timed(queue, [*command, script], directory, allocation)
                    if number:  # the first round warms the caches
                        times[script].setdefault(name, []).append(taken)
    for script, rows in times.items():
        show(script, rows)
    return 0


def show(script: str, times: dict[str, list[tuple[float, float]]]) -> None:
    print(f"{script + ', ms':27} {'first line':>23} {'':>7} {'end':>23}")
    bare = [statistics.median(column) for column in zip(*times["srun"], strict=True)]
    for name, rows in times.items():
        cells = []
        for column, base in zip(zip(*rows, strict=True), bare, strict=True):
            median = statistics.median(column)
            spread = " ".join(f"{1000 * value:7.0f}" for value in (min(column), median, max(column)))
            cells.append(f"{spread}  × {median / base:4.2f}")
        print(f"{name:27} {'  '.join(cells)}")


def timed(
    queue: Queue, command: Sequence[str], directory: str, allocation: dict[str, str]
) -> tuple[float, float]:
    """Seconds to the first line, and to the end."""
    # Compiled modules may be kept, as they are for users.
    environ = {k: v for k, v in clean_environment(**allocation).items() if k != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    with bounded(queue.start("login", command, directory=directory, env=environ)) as process:
        assert process.stdout
        line = process.stdout.readline()
        first = time.perf_counter() - started
        rest = process.stdout.read()  # communicate() would lose what readline() has buffered
        process.wait()
        ended = time.perf_counter() - started
    if (line + rest).count("hello") != len(NODES):
        raise SystemExit(f"{command}: {line}{rest}{process.stderr and process.stderr.read()}")
    return first, ended


if __name__ == "__main__":
    sys.exit(main())
