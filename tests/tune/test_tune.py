"""`cpulaunch tune` with real jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.command import bounded, clean_environment, needs_two_cores, processes_with

from cpulaunch.config.load import read_yaml

LIMIT = 500.0

# Its speed depends only on its sleep, which is half as long with two ranks.
SLEEPS = """
import os, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(40_000, 4), batch_size=4)
assert os.environ["CPULAUNCH_TUNING"] == "1"
for batch in loader:
    model(batch).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""

# Settings with fixed values, so only numbers of ranks are tried.
ONLY_RANKS = [
    "--precision=fp32",
    "--engine=native",
    "--strategy=none",
    "--allocator=default",
    "--openmp=default",
    "--backend=gloo",
]
ONLY_RANKS += ["--bucket-mb=25"]

SAVES = """
import torch, cpulaunch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(400_000, 4), batch_size=4)
checkpoint = cpulaunch.Checkpoint("ckpt", model=model, optimizer=optimizer, loader=loader, every=1)
for epoch, step, batch in checkpoint.steps(loader):
    model(batch).sum().backward()
    optimizer.step()
    checkpoint.save_if_due()
"""


def start(directory: Path, script: str, *options: str) -> subprocess.Popen[str]:
    (directory / "train.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, "-m", "cpulaunch", "tune", *options, "train.py"],
        cwd=directory,
        env=clean_environment(TUNED=str(directory)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tune(directory: Path, script: str, *options: str) -> tuple[int, str, str]:
    with bounded(start(directory, script, *options), LIMIT) as process:
        out, err = process.communicate()
        return process.returncode, out, err


def left_behind(directory: Path) -> list[int]:
    return processes_with(f"TUNED={directory}")


@pytest.mark.slow
@needs_two_cores
def test_the_faster_number_of_ranks_is_found_and_written(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("cpulaunch: 1\nhosts:\n  nproc: 1\noutput:\n  tee: none\n")
    fixed = ["--config-file", "base.yaml", *ONLY_RANKS]
    code, out, err = tune(tmp_path, SLEEPS, "--budget", "400s", "--format", "json", *fixed)
    assert code == 0, err
    document = json.loads(out)
    assert document["winner"] == {"hosts.nproc": 2}
    assert len(document["ratios"]) == 3
    assert all(1.5 < ratio < 2.5 for ratio in document["ratios"])
    assert {trial["unit"] for trial in document["trials"]} == {"samples"}
    written = (tmp_path / "cpulaunch.yaml").read_text()
    assert yaml.safe_load(written)["hosts"] == {"nproc": 2}
    assert yaml.safe_load(written)["output"] == {"tee": "none"}  # from the file that was read
    assert "# nproc 2" in written
    assert read_yaml(tmp_path / "cpulaunch.yaml")
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_a_checkpoint_writes_nothing(tmp_path: Path) -> None:
    code, out, err = tune(tmp_path, SAVES, "--budget", "60s", "-n", "1", *ONLY_RANKS)
    assert code == 0, err
    assert "steps/s" in out or "samples/s" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.slow
def test_a_budget_for_one_trial_gets_the_advice_to_choose_a_larger_one(tmp_path: Path) -> None:
    code, _, err = tune(
        tmp_path, SLEEPS, "--budget", "30s", "-n", "1", "--wdir", str(tmp_path), *ONLY_RANKS[:-1]
    )
    assert code == 0
    assert re.search(r"no time was left for other trials, because one takes \d+ s; try --budget \d+m", err)
    assert "warning: the script runs many times" not in err


@pytest.mark.slow
def test_an_interrupted_tuning_shows_its_trials_and_leaves_no_process(tmp_path: Path) -> None:
    with bounded(start(tmp_path, SLEEPS, "--budget", "10m", *ONLY_RANKS), LIMIT) as process:
        assert process.stderr is not None
        while "trial 1: " not in (line := process.stderr.readline()):
            assert line, "it has ended"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
        assert process.returncode == 130
    assert "(default)" in out
    assert not (tmp_path / "cpulaunch.yaml").exists()
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_a_failing_script_is_reported_with_the_reason(tmp_path: Path) -> None:
    code, out, _ = tune(tmp_path, "raise ValueError('no data')", "--budget", "60s", "-n", "1")
    assert code == 1
    assert "ValueError: no data" in out
    assert not (tmp_path / "cpulaunch.yaml").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "soon"], "'soon' is not a time such as 90s, 10m or 2h"),
        (["-o", "there.yaml"], "there.yaml exists already"),
        (["--instances", "2"], "instances can't be tuned"),
        (["--nope"], "unknown option --nope"),
    ],
)
def test_bad_input_is_refused_before_anything_is_run(
    tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "there.yaml").touch()
    code, _, err = tune(tmp_path, "raise SystemExit(9)", *options)
    assert code == 2
    assert message in err
    assert not os.path.exists(tmp_path / "runs")
