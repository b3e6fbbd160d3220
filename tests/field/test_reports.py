"""Reports on jobs that sleep, and on tiny figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT, Run, clean_environment
from support.telemetry import write_job

from cpulaunch.report.findings import findings
from cpulaunch.report.numbers import Numbers
from cpulaunch.report.page import render
from cpulaunch.report.read import read_job

SLEEPS = """
import time, torch
parameter = torch.nn.Parameter(torch.zeros(10))
optimizer = torch.optim.SGD([parameter], 0.1)
for step in range(30):
    time.sleep(0.5)
    parameter.sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_job_that_sleeps_is_reported_as_off_the_cpu(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text(SLEEPS)
    options = ("-n", "1", "--backend", "gloo", "--precision", "fp32", "--heartbeat-timeout", "3")
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "run", *options, "sleep.py"],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (place,) = tmp_path.glob("runs/*")
    numbers = Numbers(read_job(place))
    shares = {name: float(each[0]) for name, each in numbers.shares().items()}
    assert shares["off the CPU"] > 0.5
    assert sum(shares.values()) <= 1.001
    assert any("off the CPU: the program sleeps" in each.text for each in findings(numbers))


def test_waiting_is_not_reported_as_time_off_the_cpu(tmp_path: Path) -> None:
    """Sleeping in a collective counts as waiting.  If the CPU time is unknown, none counts as off the CPU."""
    for waiting, used, off in ((0.05, 0.5, 0.0), (0.0, 0.5, 0.5), (0.0, None, 0.0), (0.0, 4.0, 0.0)):
        place = write_job(tmp_path, job=f"{waiting}-{used}", steps=0)
        lines = [
            {"rank": 0, "step": n, "time": n / 10, "seconds": 0.1, "communication": waiting, "waiting": waiting,
             "input": 0.0}
            for n in range(1, 41)
        ]  # fmt: skip
        rows = [{"rank": 0, "time": at, "rss": 1, "cpu_seconds": at * used} for at in (1.0, 4.0) if used]
        text = "".join(json.dumps(row) + "\n" for row in ({"schema": 1}, *lines, *rows))
        (place / "telemetry.jsonl").write_text(text)
        shares = Numbers(read_job(place)).shares()
        assert abs(float(shares.get("off the CPU", [0.0])[0]) - off) < 0.01, (waiting, used)


def test_no_ratio_of_tiny_shares_is_shown(tmp_path: Path) -> None:
    jobs = []
    for name, waiting in (("a", 0.0001), ("b", 0.0002), ("c", 0.02)):
        place = write_job(tmp_path, job=name, steps=0)
        lines = [
            {"rank": rank, "step": n, "time": n / 10, "seconds": 0.1, "communication": waiting,
             "waiting": waiting, "input": 0.0}
            for n in range(1, 41) for rank in range(4)
        ]  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in ({"schema": 1}, *lines))
        (place / "telemetry.jsonl").write_text(text)
        jobs.append(read_job(place))
    page = render(jobs, "", "test")
    row = page[page.index("<td>exposed communication</td>") :].partition("</tr>")[0]
    assert "(2.00×)" not in row
    assert "(200.00×)" in row
