"""The box about an exception."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from support.jobs import box

from cpulaunch.model.names import INSTANCE, Names
from cpulaunch.supervise.job.outcome import Failure, Outcome, RankOutcome
from cpulaunch.supervise.output import box as boxes
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.output.failure_box import failure_report

FRAMES = ["Traceback (most recent call last):", '  File "train.py", line 7, in <module>', "    step()"]


def nothing_kept(rank: int) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("error", "traceback", "shown"),
    [
        ("ValueError: x", [*FRAMES, "ValueError: x"], ["ValueError: x", "at train.py:7", "", *FRAMES]),
        (
            "ValueError: x",
            [*FRAMES, "ValueError: x", "y"],
            ["ValueError: x", "at train.py:7", "", *FRAMES, "ValueError: x", "y"],
        ),
        ("KeyboardInterrupt", ["KeyboardInterrupt"], ["KeyboardInterrupt", "at train.py:7"]),
    ],
    ids=["one line", "a message of two lines stays whole", "no frames"],
)
def test_the_box_shows_an_error_once(
    tmp_path: Path, error: str, traceback: list[str], shown: list[str]
) -> None:
    text = "".join(f"{line}\n" for line in traceback)
    failure = Failure(0, "a", exit_code=1, error=error, file="train.py", line=7, traceback=text)
    rank = RankOutcome(0, "a", 1, "0", "failed")
    outcome = Outcome(1, "error", 1.0, failure, (rank,))
    assert box(failure_report(outcome, JobDirectory(tmp_path), nothing_kept))[1] == shown


@pytest.mark.parametrize(
    ("pid", "title"), [(None, "was not started"), (7, "was started, but not as planned")]
)
def test_the_title_names_a_failed_start(tmp_path: Path, pid: int | None, title: str) -> None:
    failure = Failure(1, "a", error="rank 1 was put on CPUs 0, but is on 1")
    ranks = (RankOutcome(0, "a", 6, "0", "failed"), RankOutcome(1, "a", pid, "0", "failed to start"))
    outcome = Outcome(3, "start_failed", 1.0, failure, ranks)
    shown = failure_report(outcome, JobDirectory(tmp_path), nothing_kept, Names(INSTANCE))
    assert box(shown)[0] == f"instance 1 on a {title}"


def test_the_last_output_of_a_rank_with_a_killed_agent_is_shown(tmp_path: Path) -> None:
    """Intel MPI kills the agent of a rank whose MPI_Init aborts, and only the rank's output has the reason."""
    (tmp_path / "rank-0.log").write_text("Abort(1) on node 0: Fatal error in internal_Init_thread\n")
    failure = Failure(0, "a", signal=9, error="its agent ended without a report")
    outcome = Outcome(137, "signal", 1.0, failure, (RankOutcome(0, "a", 1, "0", "lost"),))
    lines = box(failure_report(outcome, JobDirectory(tmp_path), nothing_kept))[1]
    assert lines[:2] == ["SIGKILL (killed)", "its agent ended without a report"]
    assert lines[3:5] == ["Its last output:", "Abort(1) on node 0: Fatal error in internal_Init_thread"]


def test_a_cpp_exception_is_shown_before_the_programs_threads(tmp_path: Path) -> None:
    """The box leaves out cpulaunch's threads, and its frames around functions of torch."""
    threading = '  File "/usr/lib/python3.12/threading.py", line 331 in wait\n'
    ours = f'{threading}  File "/venv/cpulaunch/runtime/observe/mirror.py", line 122 in run\n{threading}'
    wrapper = '  File "/venv/cpulaunch/runtime/observe/communication.py", line 93 in call\n'
    main = '  File "train.py", line 20 in step\n'
    (tmp_path / "rank-0.log").write_text(
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  8 vs 4. Too much.\n"
        "Fatal Python error: Aborted\n\nCurrent thread 0x3 (most recent call first):\n"
        '  File "/venv/cpulaunch/runtime/observe/abort.py", line 52 in before_abort\n\n'
        f"Thread 0x1 (most recent call first):\n{ours}\n"
        f"Thread 0x2 (most recent call first):\n{wrapper}{main}"
    )
    outcome = Outcome(
        134, "signal", 1.0, Failure(0, "a", signal=6), (RankOutcome(0, "a", 1, "0", "signal 6"),)
    )
    lines = box(failure_report(outcome, JobDirectory(tmp_path), nothing_kept))[1]
    assert lines[1:8] == [
        "",
        "gloo::EnforceNotMet: 8 vs 4. Too much.",
        "",
        "Fatal Python error: Aborted",
        "",
        "Thread 0x2 (most recent call first):",
        main.rstrip(),
    ]


def test_a_long_line_is_folded_without_a_terminal(tmp_path: Path) -> None:
    error = "ValueError: " + "x" * 300
    outcome = Outcome(
        1, "error", 1.0, Failure(0, "a", exit_code=1, error=error), (RankOutcome(0, "a", 1, "0", "failed"),)
    )
    title, lines = box(failure_report(outcome, JobDirectory(tmp_path), nothing_kept))
    assert len(title) <= 120
    assert len(lines) > 2
    assert all(len(line) <= 116 for line in lines)
    assert "".join(lines) == error


def test_a_long_line_is_folded_between_words_and_a_long_path_anywhere() -> None:
    said = boxes.box("title", ["word " * 40, "/path" * 50]).splitlines()[1:-1]
    lines = [line.strip("│").strip() for line in said]
    assert all(word == "word" for line in lines[:2] for word in line.split())
    assert "".join(lines[2:]) == "/path" * 50
    assert {len(line) for line in said} == {120}


@pytest.mark.parametrize(("encoding", "corner"), [("utf-8", "╭"), ("ascii", "+"), ("latin-1", "+")])
def test_the_box_is_drawn_in_the_encoding_of_stderr(
    monkeypatch: pytest.MonkeyPatch, encoding: str, corner: str
) -> None:
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding))
    first, *rows, last = boxes.box("rank 1 failed", ["exit code 5"]).splitlines()
    assert (first[0], len(rows), len({len(first), len(last)})) == (corner, 1, 1)
    assert "".join((first, *rows, last)).isascii() == (corner == "+")
