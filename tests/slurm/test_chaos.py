"""What befalls jobs that srun has started; all of it is let happen by scripts/chaos.py --slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import chaos, chaos_slurm
from support.marks import repeat
from support.slurm import Queue

pytestmark = pytest.mark.slow

NAMES = (
    "raises while the others sleep",
    "is killed while the others wait (ccl)",
    "Python missing, no preflight",
    "link cut",
    "Ctrl-C",
    "launcher killed",
    *(name for name in chaos_slurm.EVENTS if name not in chaos.EVENTS),
)


LIKE_OTHERS = (
    "raises while the others sleep",
    "Python missing, no preflight",
    "Ctrl-C",
    "slurmd missing at start",
)


@pytest.mark.parametrize("name", [repeat(name) if name in LIKE_OTHERS else name for name in NAMES])
def test_what_befalls_a_job_is_named_and_leaves_nothing(name: str, queue: Queue, tmp_path: Path) -> None:
    rank = NAMES.index(name) % 4
    result = chaos_slurm.run(queue, tmp_path, name, rank)
    assert not chaos.problems(chaos_slurm.EVENTS[name], rank, result), result.stderr
