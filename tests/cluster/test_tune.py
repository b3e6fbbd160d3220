"""`cpulaunch tune` on several hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.conftest import Run

pytestmark = pytest.mark.repeats  # takes minutes

TRAINS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group()
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in torch.utils.data.DataLoader(torch.randn(800_000, 64), batch_size=8):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_four_hosts_are_tuned_within_the_budget(cpulaunch: Run, four: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    fixed = (
        "--precision=fp32",
        "--engine=native",
        "--strategy=none",
        "--allocator=default",
        "--bucket-mb=25",
    )
    options = ("--launcher=ssh", "-f", four, "-ppn=1", "--openmp=default", "--tee=none", *fixed)
    done = cpulaunch("tune", "--budget=400s", "--format=json", *options, "train.py", timeout=500.0)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    trials = document["trials"]
    assert trials[0]["settings"] == {}
    assert {"training.backend": "gloo"} in [trial["settings"] for trial in trials]
    assert all(trial["per_second"] for trial in trials if not trial["failed"])
    assert sum(trial["seconds"] for trial in trials) < 400
