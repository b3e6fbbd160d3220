"""Any two extras can be installed together: pip finds a set of versions that fits, and that works."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from support.command import REPOSITORY
from support.marks import repeat

pytestmark = pytest.mark.slow

EXTRAS = ("hf", "intel", "report", "tensorboard")
LIMIT = 300.0  # seconds, as pip reads an index


def versions(extras: str, tmp_path: Path) -> dict[str, str]:
    """What pip would install."""
    report = tmp_path / "report.json"
    argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
            "--no-build-isolation", "--report", str(report), f"{REPOSITORY}[{extras}]"]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {each["name"].lower().replace("-", "_"): each["version"] for each in found}


@pytest.mark.parametrize("pair", [repeat(",".join(pair)) for pair in combinations(EXTRAS, 2)])
def test_two_extras_fit_together(pair: str, tmp_path: Path) -> None:
    found = versions(pair, tmp_path)
    assert "torch" in found
    if "intel" in pair:
        assert found["torch"].startswith("2.8.")
        assert tuple(map(int, found["transformers"].split(".")[:2])) < (5, 24)
