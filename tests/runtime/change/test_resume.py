"""Scripts that don't handle restarts continue from their libraries' own checkpoints, with one line about it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import clean_environment

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).with_name("programs_resume.py")
LIMIT = 150.0


def run(directory: Path, name: str, **environment: str) -> tuple[list[dict[str, Any]], str]:
    """The results of a script's two ranks, and stderr."""
    directory.mkdir()
    command = [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--oversubscribe", "--tee", "all",
               "--precision", "fp32", "--max-restarts", "1", PROGRAMS, name]  # fmt: skip
    done = subprocess.run([*map(str, command)], cwd=directory, env=clean_environment(**environment), text=True,
                          capture_output=True, timeout=LIMIT, stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(each) for each in re.findall(r"RESULT (\{.*\})", done.stdout)], done.stderr


def test_a_trainer_loads_its_last_complete_checkpoint(tmp_path: Path) -> None:
    """A rank died in step 13.

    The checkpoint of step 10 is complete, step 12's is not, and step 16's belongs to another job.
    """
    calm, _ = run(tmp_path / "calm", "trainer")
    struck, errors = run(tmp_path / "struck", "trainer", STRUCK="1")
    assert errors.count("cpulaunch: restarted: the Trainer resumes after step 10 from out/checkpoint-10") == 1
    assert errors.count("restarted: ") == 1, errors
    assert [(each["step"], each["steps here"]) for each in struck] == 2 * [(24, 14)]
    assert {each["weights"] for each in struck} == {each["weights"] for each in calm}
    assert len({each["weights"] for each in calm}) == 1


def test_accelerate_loads_its_last_state_and_skips_its_batches(tmp_path: Path) -> None:
    calm, _ = run(tmp_path / "calm", "accelerate")
    struck, errors = run(tmp_path / "struck", "accelerate", STRUCK="1")
    assert errors.count("cpulaunch: restarted: accelerate resumes after step 10 from ") == 1
    for one, other in zip(struck, calm, strict=True):
        assert (one["steps here"], other["steps here"]) == (14, 24)
        for same in ("weights", "rate", "evaluated"):
            assert one[same] == other[same]
    assert struck[0]["states"] == [f"checkpoint_{number}" for number in (0, 1, 7, 8, 9)]
