"""PyTorch's own suite, from the torch wheel: ccl passes the tests that gloo passes on CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torch_suite.py"
# Tests of some kinds.  scripts/torch_suite.py runs all of them.
KINDS = (
    "DistributedDataParallelCPU", "batch_isend_irecv_gloo_tags", "scatter_object_list",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_pytorchs_suite_for_process_groups(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's test helpers import it")
    out = tmp_path / "suite.json"
    only = f"^test_({'|'.join(KINDS)})$"
    argv = [sys.executable, str(SCRIPT), "ccl", "--ranks", "2", "--only", only, "--out", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400)
    assert out.exists(), done.stderr
    tests = json.loads(out.read_text())["tests"]
    failed = {name: test["reason"] for name, test in tests.items() if test["status"] == "failed"}
    assert not failed
    assert sum(test["status"] == "passed" for test in tests.values()) > 1
