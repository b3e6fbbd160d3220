"""With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps each group, but hangs are explained as usual."""

from __future__ import annotations

from pathlib import Path

import pytest
from hangs.conftest import hang
from support.hangs import Hang, line_of, stall
from support.marks import repeat

__all__ = ["hang"]

pytestmark = pytest.mark.slow

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_the_late_rank_is_named_with_its_line(backend: str, hang: Hang, tmp_path: Path) -> None:
    title, lines, found = stall(tmp_path, hang("late", backend=backend, **DETAIL))
    assert "rank 1 on localhost has not called all_reduce #6" in title
    assert lines[0].startswith(
        "rank 0 on localhost waits in all_reduce #6 of group 0, 4 kB float32, at train.py:"
    )
    assert f"train.py:{line_of('time.sleep(600)', 'def load_batch')} load_batch" in " ".join(lines)
    assert found["ranks"] == [1]
