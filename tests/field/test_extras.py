"""Any two extras can be installed together: pip finds compatible versions, and they work."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from support.command import REPOSITORY, clean_environment
from support.marks import repeat

pytestmark = pytest.mark.slow

EXTRAS = ("hf", "intel", "mpi", "report", "tensorboard")
LIMIT = 300.0  # seconds, because pip reads an index over the network


def versions(extras: str, tmp_path: Path) -> dict[str, str]:
    """The versions that pip would install."""
    report = tmp_path / "report.json"
    argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
            "--no-build-isolation", "--report", str(report), f"{REPOSITORY}[{extras}]"]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {each["name"].lower().replace("-", "_"): each["version"] for each in found}


@pytest.mark.parametrize("pair", [repeat(",".join(pair)) for pair in combinations(EXTRAS, 2)])
def test_two_extras_can_be_installed_together(pair: str, tmp_path: Path) -> None:
    found = versions(pair, tmp_path)
    assert "torch" in found
    if "mpi" in pair:
        assert "impi_rt" in found or platform.machine() != "x86_64"
    if "intel" in pair:
        assert found["torch"].startswith("2.8.")
        assert tuple(map(int, found["transformers"].split(".")[:2])) < (5, 24)


IMPORTED = {
    "hf": "import accelerate, transformers; transformers.TrainingArguments",
    "tensorboard": "import tensorboardX; tensorboardX.SummaryWriter",
}
ALREADY_THERE = re.compile(r"torch|triton|nvidia.*|cuda.*|cpulaunch")
"""Large packages that the tests' environment already has, and cpulaunch itself."""


@pytest.mark.parametrize("extra", [repeat("hf"), "tensorboard"])
def test_the_packages_of_an_extra_can_be_imported(extra: str, tmp_path: Path) -> None:
    """This tests the versions that pip chooses today with the installed torch."""
    wanted = [f"{n}=={v}" for n, v in versions(extra, tmp_path).items() if not ALREADY_THERE.fullmatch(n)]
    place = tmp_path / "packages"
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), *wanted]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    imports = subprocess.run(
        [sys.executable, "-c", f"import torch; {IMPORTED[extra]}"],
        env=clean_environment(PYTHONPATH=str(place)), cwd=tmp_path, capture_output=True, text=True,
        timeout=LIMIT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert imports.returncode == 0, imports.stderr
