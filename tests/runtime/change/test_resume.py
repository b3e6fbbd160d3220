"""Scripts that know nothing of restarts go on from their libraries' own checkpoints, and one line says so."""

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
    """What the two ranks of a script found, and stderr."""
    directory.mkdir()
    command = [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--oversubscribe", "--tee", "all",
               "--precision", "fp32", "--max-restarts", "1", PROGRAMS, name]  # fmt: skip
    done = subprocess.run([*map(str, command)], cwd=directory, env=clean_environment(**environment), text=True,
                          capture_output=True, timeout=LIMIT, stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(each) for each in re.findall(r"RESULT (\{.*\})", done.stdout)], done.stderr


def test_a_trainer_takes_its_last_whole_checkpoint(tmp_path: Path) -> None:
    """It died in step 13; that of step 10 is whole, that of step 12 lacks its end, and that of 16 is another job's."""
    calm, _ = run(tmp_path / "calm", "trainer")
    struck, errors = run(tmp_path / "struck", "trainer", STRUCK="1")
    assert errors.count("cpulaunch: restarted: the Trainer resumes after step 10 from out/checkpoint-10") == 1
    assert errors.count("restarted: ") == 1, errors
    assert [(each["step"], each["steps here"]) for each in struck] == 2 * [(24, 14)]
    assert {each["weights"] for each in struck} == {each["weights"] for each in calm}
    assert len({each["weights"] for each in calm}) == 1


def test_accelerate_loads_its_last_state_and_leaves_its_batches_out(tmp_path: Path) -> None:
    calm, _ = run(tmp_path / "calm", "accelerate")
    struck, errors = run(tmp_path / "struck", "accelerate", STRUCK="1")
    assert errors.count("cpulaunch: restarted: accelerate resumes after step 10 from ") == 1
    for one, other in zip(struck, calm, strict=True):
        assert (one["steps here"], other["steps here"]) == (14, 24)
        for same in ("weights", "rate", "evaluated"):
            assert one[same] == other[same]
    assert struck[0]["states"] == [f"checkpoint_{number}" for number in (0, 1, 7, 8, 9)]
