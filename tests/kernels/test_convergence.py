"""A small model of scripts/bench/convergence.py learns as much with the kernels as without them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "scripts" / "bench" / "convergence.py"


@pytest.mark.repeats
@pytest.mark.slow
def test_a_gpt2_reaches_the_loss_that_torch_reaches() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--models", "gpt2", "--steps", "40", "--seeds", "2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("| gpt2 |"))
    losses = [float(cell.partition("±")[0]) for cell in row.split("|")[2:4]]
    assert all(loss < 0.75 * math.log(257) for loss in losses)  # both have learned
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
