"""If a rank doesn't call a monitored barrier, the report names this rank, not the waiting ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Run
from support.jobs import outcome
from support.marks import repeat

pytestmark = pytest.mark.slow

SCRIPT = """
import datetime, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(600)
dist.monitored_barrier(timeout=datetime.timedelta(seconds=2), wait_all_ranks=sys.argv[1] == "all")
"""


@pytest.mark.parametrize("wait_for", ["all", repeat("first")])
def test_the_missing_rank_is_named(wait_for: str, cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--oversubscribe", "--backend", "gloo", "--precision", "fp32")
    done = cpulaunch("run", "-n", "3", *options, "train.py", wait_for)
    assert done.returncode == 1, done.stderr
    first = outcome(tmp_path)["first_failure"]
    assert (first["rank"], first["cause"]["kind"]) == (0, "peer_late")
    assert "rank 1" in (first["text"] or first["error"])
