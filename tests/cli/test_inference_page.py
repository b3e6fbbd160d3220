"""Every command in docs/inference.md works as printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.command import REPOSITORY, Run, needs_two_cores
from support.marks import repeat

PAGE = (REPOSITORY / "docs" / "inference.md").read_text()
COMMANDS = [
    command for command in re.findall(r"^cpulaunch (run .*)$", PAGE, re.M) if " examples/" not in command
]
"""The commands on the page, except those of the examples, which tests/examples/test_inference.py runs."""

BIG = ["--lscpu", REPOSITORY / "tests/plan/2x28.lscpu"]


def is_like_another(command: str) -> bool:
    """Whether the command does the same as another; tests/cli/test_habits.py tests its options."""
    return any(
        words in command
        for words in ("--ninstances", "_mode", "--instances auto", "--cores-per-instance", "--fail-fast")
    )


# Commands that need four cores or four hosts are only planned, for a larger machine.
FOR_LARGER = ("--latency-mode", "-f hostfiles")


def part(heading: str) -> str:
    """The block of code below the line that ends with ``heading``."""
    return re.findall(rf"{re.escape(heading)}:\n\n```\w+\n(.*?)^```", PAGE, re.M | re.S)[0]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "infer.py").write_text(part("`infer.py`"))
    (tmp_path / "args.txt").write_text(part("`args.txt`"))
    shutil.copytree(REPOSITORY / "hostfiles", tmp_path / "hostfiles")
    return tmp_path


def test_the_page_has_commands_with_all_options_for_instances() -> None:
    options = {"--instances", "--cores-per-instance", "--latency-mode", "--instance", "--each", "--fail-fast",
               "--throughput_mode", "-f", "{instance}"}  # fmt: skip
    assert {option for option in options if any(option in command for command in COMMANDS)} == options


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("command", [repeat(each) if is_like_another(each) else each for each in COMMANDS])
def test_the_commands_on_the_page_work(command: str, cpulaunch: Run, directory: Path) -> None:
    words = command.split()
    if any(part in command for part in FOR_LARGER):
        done = cpulaunch("run", *BIG, "--dry-run", *[word for word in words[1:] if word != "--dry-run"])
        assert " instances on " in done.stdout
        assert "local instance 1: cores" in done.stdout
    else:
        done = cpulaunch(*words)
        assert re.search(r"^cpulaunch: latency +median [\d.]+ ms, 99th percentile", done.stderr, re.M)
        assert re.search(r"^cpulaunch: throughput +[\d.,e+]+ samples/s in all", done.stderr, re.M)
    assert done.returncode == 0, done.stderr
