"""If two threads of a rank wait in collectives of different groups, each call is shown with its own line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hangs.conftest import hang
from support.hangs import Hang, line_of, stall
from support.marks import repeat

__all__ = ["hang"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_each_call_is_shown_with_the_line_of_its_thread(backend: str, hang: Hang, tmp_path: Path) -> None:
    title, lines, found = stall(tmp_path, hang("in_two_threads", backend=backend))
    text = " ".join(lines)
    if found["operation"] == "broadcast":
        at = f"{line_of('dist.broadcast(ones, 0, group)')} spread, in its thread spread"
        call = "broadcast #0 of group 2, 4 kB float32"
    else:
        at = f"{line_of('dist.all_reduce(more, group=first)')} in_two_threads"
        call = "all_reduce #0 of group 1, 8 kB float32"
    assert f"rank 1 on localhost has not called {found['operation']} #0" in title
    assert text.startswith(f"rank 0 on localhost waits in {call}, at train.py:{at}")
    assert found["ranks"] == [1]
