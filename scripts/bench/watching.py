"""Measures the cost of watching: CPU time of an idle job, and the throughput of output.

    python scripts/bench/watching.py [--ranks 8] [--seconds 40] [--rounds 3]

Prints microseconds of CPU time per second of the launcher and of each agent while ranks sleep
(``/proc/PID/schedstat``).  Then prints lines per second of two ranks through cpulaunch, and through plain
pipes, in turn, and the launcher's largest memory (min, median, max).
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

LINES = 400_000
PRINT = f"import sys\nfor i in range({LINES}): sys.stdout.write('%07d some line of a usual length\\n' % i)\n"
RUN = [sys.executable, "-m", "cpulaunch", "run", "--oversubscribe", "--tee", "all"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        launcher, agents = idle(Path(directory), options.ranks, options.seconds)
        print(f"{options.ranks} sleeping ranks, us of a core per second:")
        print(f"  launcher {launcher:.0f}; agents {spread(agents)}")
        ours, plain, memory = [], [], []
        for _ in range(options.rounds):
            rate, megabytes = printing(Path(directory))
            ours.append(rate)
            memory.append(megabytes)
            plain.append(printing_alone(Path(directory)))
        print(f"2 printing ranks, 1000 lines/s: cpulaunch {spread(ours)}; a pipe each {spread(plain)}")
        print(f"largest memory of the launcher, MB: {spread(memory)}")
    return 0


def idle(directory: Path, ranks: int, seconds: float) -> tuple[float, list[float]]:
    """Return the CPU microseconds per second of the launcher, and of each agent."""
    (directory / "sleep.py").write_text("import time\nprint('up')\ntime.sleep(3600)\n")
    with subprocess.Popen(
        [*RUN, "-n", str(ranks), "sleep.py"], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as launcher:
        assert launcher.stdout
        try:
            for _ in range(ranks):
                launcher.stdout.readline()
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            pids = [str(launcher.pid), *children]
            before = [spent(pid) for pid in pids]
            time.sleep(seconds)
            own, *others = (1e-3 * (spent(pid) - b) / seconds for pid, b in zip(pids, before, strict=True))
        finally:
            launcher.terminate()
    return own, others


def spent(pid: str) -> int:
    """Return the nanoseconds for which a process has run."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def printing(directory: Path) -> tuple[float, float]:
    """Return the thousands of lines per second, and the launcher's largest memory in MB."""
    (directory / "print.py").write_text(PRINT)
    started = time.perf_counter()
    with subprocess.Popen(
        [*RUN, "-n", "2", "print.py"], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as launcher:
        assert launcher.stdout
        count = sum(
            chunk.count(b"\n") for chunk in iter(lambda: os.read(launcher.stdout.fileno(), 1 << 16), b"")
        )
        _, _, usage = os.wait4(launcher.pid, 0)
        launcher.returncode = 0
    if count != 2 * LINES:
        raise SystemExit(f"{count} of {2 * LINES} lines arrived")
    return count / (time.perf_counter() - started) / 1000, usage.ru_maxrss / 1024


def printing_alone(directory: Path) -> float:
    """Return the thousands of lines per second of two processes that write into pipes."""
    started = time.perf_counter()
    command = [sys.executable, str(directory / "print.py")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for process in running:
        process.communicate()
    return 2 * LINES / (time.perf_counter() - started) / 1000


def spread(values: list[float]) -> str:
    return f"{min(values):.0f} / {statistics.median(values):.0f} / {max(values):.0f}"


if __name__ == "__main__":
    sys.exit(main())
