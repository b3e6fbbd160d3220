"""Memory on a NUMA node other than a rank's cores, on a virtual machine with two nodes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import REPOSITORY

from cpulaunch.report.findings import findings
from cpulaunch.report.numbers import Numbers
from cpulaunch.report.read import read_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("CPULAUNCH_TEST_NUMA"), reason="CPULAUNCH_TEST_NUMA is not set (CONTRIBUTING.md)"
    ),
]

LIMIT = 600.0
"""Seconds for the virtual machine, whose processors are emulated."""

# Rank 1, whose core is on node 1, has its data on node 0 (mbind, MPOL_BIND).  Agents look every five seconds.
PROGRAM = """
import ctypes, mmap, os, time
size = 200 << 20
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
if os.environ["RANK"] == "1":
    at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    nodes, call = ctypes.c_ulong(1), ctypes.CDLL(None, use_errno=True).syscall
    assert call(237, at, ctypes.c_ulong(size), 2, ctypes.byref(nodes), ctypes.c_ulong(64), 0) == 0
for page in range(0, size, 4096):
    memory[page] = 1
time.sleep(8)
"""

JOB = """
cd /mnt
exec {python} -m cpulaunch run -n 2 --backend gloo program.py
"""


def test_the_rank_with_far_memory_is_named_first(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "program.py").write_text(PROGRAM)
    exported = f"export PYTHONPATH={shlex.quote(str(REPOSITORY))} HOME=/root LC_ALL=C.UTF-8 PATH={os.environ['PATH']}"
    (tmp_path / "job.sh").write_text(exported + JOB.format(python=shlex.quote(sys.executable)))
    done = subprocess.run(
        [REPOSITORY / "scripts" / "numa_vm.sh", "2", tmp_path / "job.sh", shared],
        capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    printed = shared / "out"
    assert done.returncode == 0, done.stderr + (printed.read_text() if printed.exists() else "")
    (telemetry,) = shared.glob("runs/*/telemetry.jsonl")
    rows = [json.loads(line) for line in telemetry.read_text().splitlines()]
    shares = [[row["far_memory"] for row in rows if "far_memory" in row and row["rank"] == n] for n in (0, 1)]
    assert max(shares[0]) < 0.2 < 0.6 < max(shares[1])
    first, *others = [each.text for each in findings(Numbers(read_job(telemetry.parent)))]
    assert first.endswith("% of the memory of rank 1 on localhost is on other NUMA nodes than its cores")
    assert not others
