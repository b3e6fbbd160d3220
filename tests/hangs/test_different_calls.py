"""Real ranks that call different operations, or with different sizes, types or roots: both sides are shown."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.hangs import PAGES, Hang, line_of, stall
from support.jobs import box, outcome

pytestmark = pytest.mark.slow


def test_different_operations_are_shown_with_both_lines(hang: Hang, tmp_path: Path) -> None:
    title, lines, _ = stall(tmp_path, hang("other_operation", backend="gloo"), in_docs=True)
    assert "make different calls" in title
    at = f"train.py:{line_of('dist.all_reduce(tensor)')} step"
    assert any(line.startswith("rank 0 on localhost: all_reduce") and at in line for line in lines)
    at = f"train.py:{line_of('dist.broadcast(')} other_operation"
    assert any(line.startswith("rank 1 on localhost: broadcast") and at in line for line in lines)


def test_ccl_itself_finds_operations_that_differ(hang: Hang, tmp_path: Path) -> None:
    """ccl finds them at once, without a stall.

    The last rank to call fails first, and both lines are shown anyway.
    """
    done = hang("other_operation", "--stall-timeout", "30")
    result = outcome(tmp_path)
    assert (done.returncode, result["kind"], result["stalls"]) == (1, "error", []), done.stderr
    assert result["first_failure"]["disagree"]
    cause = result["first_failure"]["cause"]
    assert cause["kind"] == "calls_differ"
    assert set(cause["operations"]) == {"all_reduce", "broadcast"}
    usual = f"all_reduce #3 of group 0, 4 kB float32, at train.py:{line_of('dist.all_reduce(tensor)')} step"
    sides = [
        f"rank 0 on localhost: {usual}",
        "rank 1 on localhost: broadcast #3 of group 0, 4 kB float32, "
        f"at train.py:{line_of('dist.broadcast(')} other_operation",
    ]
    assert result["first_failure"]["note"].splitlines() == sides
    _, lines = box(done.stderr)
    assert set(sides) <= set(lines)
    assert "\n".join(sides) in PAGES


STEP = f"train.py:{line_of('dist.all_reduce(tensor)')} step"


def test_a_timeout_of_the_group_is_explained_by_the_other_ranks_calls(hang: Hang, tmp_path: Path) -> None:
    """The waiting rank fails first, but is not the cause."""
    who = "rank 1 on localhost has not called all_reduce #1"
    done = hang("hasty", "--stall-timeout", "30")
    result = outcome(tmp_path)
    first = result["first_failure"]
    assert (done.returncode, result["kind"], result["stalls"]) == (1, "error", []), done.stderr
    assert (first["text"], first["ranks"], first["disagree"]) == (who, [1], False)
    assert first["cause"]["timeout"] == 3.0
    title, lines = box(done.stderr)
    assert title == who
    assert set(first["note"].splitlines()) <= set(lines)
    at = f"train.py:{line_of('dist.all_reduce(more, group=group)')} hasty"
    assert f"all_reduce #1 of group 1, 8 kB float32, at {at}" in first["note"]
    assert "was not completed within its timeout of 3 s" in first["error"]
    assert title in PAGES
    assert first["note"].splitlines()[0] in PAGES


def test_ranks_of_a_smaller_group_have_the_jobs_rank_numbers(hang: Hang, tmp_path: Path) -> None:
    """This includes a rank that has destroyed the group."""
    done = hang("destroyed_pair", "--stall-timeout", "30", "-n", "3", "--oversubscribe")
    assert box(done.stderr)[0] == "rank 2 on localhost failed first"
    note = outcome(tmp_path)["first_failure"]["note"].splitlines()
    assert [re.split(",? at train.py:", line)[0] for line in note] == [
        "rank 2 on localhost: all_reduce #1 of group 1, 8 kB float32",
        "rank 1 on localhost has left group 1 and is",
    ]


def test_sizes_that_gloo_refuses_are_shown_for_both_ranks(hang: Hang, tmp_path: Path) -> None:
    """gloo aborts a rank that is not to blame.  The other rank only loses its connection."""
    done = hang("other_size", "--stall-timeout", "30", backend="gloo")
    result = outcome(tmp_path)
    first = result["first_failure"]
    assert (done.returncode, first["rank"], first["signal"]) == (134, 0, 6), done.stderr
    aborted, other = first["note"].splitlines()
    at = f"train.py:{line_of('dist.all_reduce(tensor)')} step"
    assert aborted == f"rank 0 on localhost: all_reduce #3 of group 0, 4 kB float32, at {at}"
    at = f"train.py:{line_of('dist.all_reduce(more)')} other_size"
    assert other == f"rank 1 on localhost: all_reduce #3 of group 0, 8 kB float32, at {at}"
    title, lines = box(done.stderr)
    assert title == "ranks make different calls, and rank 0 on localhost failed first"
    assert {aborted, other} <= set(lines)
    assert "Received data size doesn't match expected size." in "".join(lines)
    assert "_bootstrap_inner" not in "".join(lines)  # of the thread that copies torch's recorder
    assert "observe/abort.py" not in "".join(lines)


@pytest.mark.repeats
def test_ccl_finds_different_types_of_equal_size_and_gloo_does_not(hang: Hang, tmp_path: Path) -> None:
    """With gloo, no call fails, and the numbers are wrong."""
    assert hang("other_type", backend="gloo").returncode == 0
    assert outcome(tmp_path)["stalls"] == []
    shutil.rmtree(tmp_path / "runs")
    assert hang("other_type", "--stall-timeout", "30").returncode == 1
    called = [line.partition(", at ")[0] for line in outcome(tmp_path)["first_failure"]["note"].splitlines()]
    assert called == [
        f"rank {rank} on localhost: all_reduce #3 of group 0, 4 kB {name}"
        for rank, name in ((0, "float32"), (1, "int32"))
    ]


def test_a_bucket_of_ddp_that_gloo_refuses_is_shown_with_the_line_of_its_backward_pass(
    hang: Hang, tmp_path: Path
) -> None:
    """C++ calls the operation.  Both sides are reported, although only one is aborted."""
    case = "larger_than_a_bucket"
    done = hang(case, "--stall-timeout", "30", backend="gloo")
    first = outcome(tmp_path)["first_failure"]
    assert (first["rank"], first["signal"], first["disagree"]) == (0, 6, True), done.stderr
    backward = f"train.py:{line_of('.sum().backward()')} in_backward, in the backward pass"
    other = f"train.py:{line_of('dist.all_reduce(more)', f'def {case}')} <lambda>"
    sides = [
        f"rank 0 on localhost: all_reduce #8 of group 0, 4.4 kB float32, at {backward}",
        f"rank 1 on localhost: all_reduce #8 of group 0, 8 kB float32, at {other}",
    ]
    assert first["note"].replace(f"{case}.<locals>.", "").splitlines() == sides
    assert "\n".join(sides) in PAGES


def test_differing_roots_are_shown(hang: Hang, tmp_path: Path) -> None:
    """Each rank waits for the other one's tensor."""
    _, lines, _ = stall(tmp_path, hang("roots", backend="gloo"), in_docs=True)
    for rank in (0, 1):
        side = f"rank {rank} on localhost: broadcast #3 from rank {1 - rank} of group 0, 4 kB float32, at train.py:"
        assert lines[rank].startswith(side)
