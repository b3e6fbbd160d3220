"""What befalls jobs that srun has started; all of it is let happen by scripts/chaos.py --slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import chaos, chaos_slurm
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


@pytest.mark.parametrize("name", NAMES)
def test_what_befalls_a_job_is_named_and_leaves_nothing(name: str, queue: Queue, tmp_path: Path) -> None:
    rank = NAMES.index(name) % 4
    result = chaos_slurm.run(queue, tmp_path, name, rank)
    assert not chaos.problems(chaos_slurm.EVENTS[name], rank, result), result.stderr
