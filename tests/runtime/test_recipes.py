"""The recipes of docs/restarts.md and docs/checkpoints.md: each one runs, and its rank 1 is killed once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.command import REPOSITORY, Run
from support.marks import repeat

pytestmark = pytest.mark.slow

STRUCK = """\
import os, runpy, signal, sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
last, steps = int(sys.argv[1]), []
def stepped(*_):
    steps.append(0)
    if len(steps) == last and os.environ["CPULAUNCH_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_post_hook(stepped)
runpy.run_path("recipe.py", run_name="__main__")
"""


def recipe(page: str, title: str) -> str:
    """Return the first Python block after a heading, or after a text that precedes the block."""
    text = (REPOSITORY / "docs" / page).read_text()
    found = re.search(rf"{re.escape(title)}\n(?:.*?)```python\n(.*?)```", text, re.S)
    assert found, title
    return found[1]


@pytest.mark.parametrize(
    ("page", "title", "killed_at", "said"),
    [
        ("restarts.md", "## A plain script", 35, r"resuming after step \d+ from .*/ckpt/step-\d+"),
        repeat("checkpoints.md", "## Trainer", 7, "restarted: the Trainer resumes after step 5 from out/"),
        repeat("checkpoints.md", "## Trainer", 3, "restarted: the Trainer starts from the beginning"),
        repeat("checkpoints.md", "## accelerate", 3, "restarted: accelerate starts from the beginning"),
        repeat("checkpoints.md", "## accelerate", 12, r"restarted: accelerate resumes after step 8 from "),
        ("checkpoints.md", "Your own loop:", 25, r"resuming after step \d+ from .*/own/step-\d+"),
    ],
)
def test_a_recipe_survives_a_killed_rank(
    cpulaunch: Run, tmp_path: Path, page: str, title: str, killed_at: int, said: str
) -> None:
    (tmp_path / "recipe.py").write_text(recipe(page, title))
    (tmp_path / "struck.py").write_text(STRUCK)
    options = ("-n", "2", "--oversubscribe", "--max-restarts", "1", "--checkpoint-every", "10")
    done = cpulaunch("run", *options, "struck.py", killed_at, timeout=150)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(f"cpulaunch: {said}", done.stderr)) == 1, done.stderr
