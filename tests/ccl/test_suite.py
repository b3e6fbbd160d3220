"""PyTorch's own suite, which the torch wheel ships: what gloo passes on CPU, ccl passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torch_suite.py"
# The suite runs ccl under the name of gloo; these four look at the name.
BY_NAME = {"test_ddp_logging_data_cpu", "test_get_backend", "test_monitored_barrier_gloo",
           "test_monitored_barrier_gloo_subgroup"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_pytorchs_suite_for_process_groups(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's test helpers import it")
    out = tmp_path / "suite.json"
    argv = [sys.executable, str(SCRIPT), "ccl", "--ranks", "2", "--budget", "180", "--out", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400)
    assert out.exists(), done.stderr
    tests = json.loads(out.read_text())["tests"]
    failed = {name: test["reason"] for name, test in tests.items() if test["status"] == "failed"}
    assert set(failed) <= BY_NAME, failed
    assert sum(test["status"] == "passed" for test in tests.values()) > 30
