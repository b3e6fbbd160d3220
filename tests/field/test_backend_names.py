"""Every form of a backend's name that torch accepts selects the planned backend, also in wrapped groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import Run
from support.marks import repeat

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import torch, torch.distributed as dist, cpulaunch
name, of_group = (word if word != "none" else None for word in sys.argv[1:])
dist.init_process_group(name)
group = dist.new_group(backend=of_group)
total = torch.ones(3)
for each in (None, group):
    dist.all_reduce(total, group=each)
    dist.broadcast(total, 0, group=each)
    gathered = [torch.zeros(3) for _ in range(2)]
    dist.all_gather(gathered, total, group=each)
print("RESULT", json.dumps([cpulaunch.backend(), dist.get_backend(), total[0].item()]), flush=True)
dist.destroy_process_group()
"""


def results(stdout: str) -> list[object]:
    return [json.loads(line.partition("RESULT ")[2]) for line in stdout.splitlines() if "RESULT " in line]


@pytest.mark.parametrize(
    ("planned", "name", "of_group", "answered"),
    [
        repeat("gloo", "cpu:ccl,cuda:gloo", "none", "cpu:ccl,cuda:gloo"),
        repeat("gloo", "CPU:Gloo", "cpu:ccl", "cpu:gloo"),
        repeat("ccl", "cpu:mpi", "none", "cpu:mpi"),
        ("gloo", "ccl", "cpu:ccl,xpu:ccl", "ccl"),
    ],
)
def test_each_form_of_a_name_selects_the_planned_backend(
    planned: str, name: str, of_group: str, answered: str, cpulaunch: Run, built, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = cpulaunch(
        "run", "-n", "2", "--oversubscribe", "--tee", "all", "--backend", planned, "script.py", name, of_group
    )
    assert results(done.stdout) == [[planned, answered, 4.0]] * 2, done.stderr
    assert "warning" not in done.stderr
