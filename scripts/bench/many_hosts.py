"""Measures the cost of a thousand simulated hosts for the launcher ssh.

    python scripts/bench/many_hosts.py [--hosts 64 1024]

A script instead of ssh starts each host's spawner on this machine (`tests/agent/spawner`), with an agent
that sleeps.  Prints for each number of hosts: seconds from the start until all agents have reported, memory
and open files of the launching host's spawner at that time, and seconds from SIGTERM until all processes
have ended.  A thousand hosts are two thousand processes, which need about 8 GB.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from agent.spawner.test_spawner import Spawned, lines
from support.command import processes_with
from support.namespaces import until

AGENT = "import os; print('up', flush=True); os.execvp('sleep', ['sleep', '3600'])"
LONGEST = 600.0
"""Seconds that a start, or an end, may take."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[64, 1024])
    for hosts in parser.parse_args().hosts:
        with tempfile.TemporaryDirectory() as directory:
            measure(hosts, Spawned(Path(directory)))
    return 0


def measure(hosts: int, spawned: Spawned) -> None:
    started = time.monotonic()
    with spawned.running(lines(hosts), AGENT) as spawner:
        assert spawner.stdout
        for _ in range(hosts):
            if not spawner.stdout.readline():
                raise SystemExit(spawner.communicate()[1])
        up = time.monotonic() - started
        files = len(os.listdir(f"/proc/{spawner.pid}/fd"))
        memory = _resident(spawner.pid)
        ended = time.monotonic()
        spawner.send_signal(signal.SIGTERM)
        until(lambda: not processes_with(spawned.mark), "all processes to end", LONGEST)
        gone = time.monotonic() - ended
    print(f"{hosts} hosts: up after {up:.1f} s; {memory:.0f} MB, {files} open files; gone after {gone:.1f} s")


def _resident(pid: int) -> float:
    """The memory of a process in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    sys.exit(main())
