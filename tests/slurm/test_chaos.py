"""Faults injected into jobs that srun has started; scripts/chaos.py --slurm injects all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import chaos, chaos_slurm
from support.marks import repeat
from support.slurm import Queue

pytestmark = pytest.mark.slow

NAMES = tuple(chaos_slurm.EVENTS)

# Tests with mpiexec cover the agents' part.  Kept are Slurm's own events, and two that differ most
# under srun.
KEPT = {"link cut", "launcher killed", *(name for name in NAMES if name not in chaos.EVENTS)}
KEPT -= {"slurmd missing at start", "node set down"}  # test_restart.py tests the latter


@pytest.mark.parametrize("name", [name if name in KEPT else repeat(name) for name in NAMES])
def test_a_fault_is_reported_and_leaves_no_process(name: str, queue: Queue, tmp_path: Path) -> None:
    rank = NAMES.index(name) % 4
    result = chaos_slurm.run(queue, tmp_path, name, rank)
    assert not chaos.problems(chaos_slurm.EVENTS[name], rank, result), result.stderr
