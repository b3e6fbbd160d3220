"""Stalls of an instance, independent of the others, with a fake clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
from support.played import Played, running
from support.seen import LOAD, process

from cpulaunch import messages, wire
from cpulaunch.messages import AskDump, Dump, End
from cpulaunch.model.names import INSTANCE, Names
from cpulaunch.supervise.job.events import ReportStall
from cpulaunch.supervise.output.stall_box import stacks_text, stall_box, title
from cpulaunch.supervise.stalls.progress import ABORT, StallSettings


def instances(timeout: float | None = 8.0, action: str = "report", **different: Any) -> Played:
    hosts = ("localhost", "localhost", "localhost")
    settings = StallSettings(timeout, action)
    return running(*hosts, launcher="local", independent=True, stalls=settings, **different)


def prints(job: Played, *ranks: int, text: bytes = b"CPULAUNCH_METRIC latency=3 ms\n") -> None:
    for rank in ranks:
        job.says(rank, messages.Output(1, wire.pack(text)))


def work(job: Played, *ranks: int, until: float, processes: Sequence[Any] = ()) -> None:
    """Let time pass; ``ranks`` print every second, and all agents answer inquiries with ``processes``."""
    answered = set()
    while job.now < until and not job.state.finished:
        job.until(job.now + 0.25)
        if job.now % 1 == 0:
            prints(job, *ranks)
        for rank in range(3):
            for at, asked in job.sent(rank, AskDump):
                if (rank, at, asked.request) not in answered:
                    answered.add((rank, at, asked.request))
                    job.says(rank, Dump(asked.request, job.clock(rank), [], [*processes], "not looked at"))


def titles(job: Played) -> list[str]:
    return [title(report) for _, report in job.of(ReportStall)]


def test_an_instance_that_hangs_is_noticed_while_the_others_work() -> None:
    job = instances()
    work(job, 0, 2, until=30.0)
    (report,) = [report for _, report in job.of(ReportStall)]
    assert report.stall.ranks == (1,)
    assert [each.rank for each in report.snapshots] == [1]
    assert "instance 1 on localhost" in title(report)
    assert not any("ledger" in line for line in report.explanation.lines)
    assert none_was_ended(job, 0, 1, 2)


def test_instances_that_print_are_active() -> None:
    job = instances()
    work(job, 0, 1, 2, until=60.0)
    assert titles(job) == []


def test_a_line_reports_that_a_stalled_instance_continues() -> None:
    job = instances()
    work(job, 0, 2, until=20.0)
    prints(job, 1)
    assert [line for line in job.told if "continues" in line] == [
        "instance 1 continues, after 20 s without progress"
    ]


def test_only_the_first_of_several_stalled_instances_has_a_box() -> None:
    job = instances()
    work(job, 2, until=30.0)
    reports = [report for _, report in job.of(ReportStall)]
    assert [(report.number, report.brief) for report in reports] == [(1, False), (2, True)]
    for rank in range(3):
        job.exits(rank)
    assert [stall.ranks for stall in job.outcome().stalls] == [(0,), (1,)]


def test_a_single_instance_has_its_own_number_in_box_and_stacks() -> None:
    job = instances()
    work(job, 0, 2, until=20.0)
    ((_, report),) = job.of(ReportStall)
    first = Names(INSTANCE, 4)
    assert "[5] " in (text := stacks_text(report, first))
    assert "[1] " not in text
    assert "[5] " in stall_box(report, Path("stacks-1.txt"), first) + text


def test_aborting_ends_only_the_stalled_instance() -> None:
    job = instances(action=ABORT)
    work(job, 0, 2, until=20.0)
    assert [end.signal for _, end in job.sent(1, End)] == [SIGTERM]
    assert none_was_ended(job, 0, 2)
    job.exits(1, None, 15, by_launcher=True)
    work(job, 0, 2, until=40.0)
    (told,) = job.told
    assert told.startswith("instance 1 on localhost failed: no progress for 8 s: ")
    assert told.endswith("; the others go on")
    job.exits(0)
    job.exits(2)
    outcome = job.outcome()
    assert (outcome.kind, outcome.exit_code) == ("stalled", 4)
    assert [rank.status for rank in outcome.ranks] == ["exit 0", "ended by launcher", "exit 0"]


def test_the_place_of_the_ended_instance_is_reported_once() -> None:
    job = instances(action=ABORT)
    work(job, 0, 2, until=20.0, processes=[process(LOAD)])
    job.exits(1, None, 15, by_launcher=True)
    work(job, 0, 2, until=40.0)
    (told,) = job.told
    assert told == (
        "instance 1 on localhost failed: no progress for 8 s: it is at train.py:88 load_batch; the others go on"
    )
    ((_, report),) = job.of(ReportStall)
    assert "instance 1 on localhost is at train.py:88 load_batch" in title(report)
    box = stall_box(report, Path("stacks-1.txt"), Names(INSTANCE))
    assert [line.strip("│ ") for line in box.splitlines()][1] == "Who is where:"


def test_the_box_reports_a_missing_py_spy() -> None:
    job = instances()
    work(
        job,
        0,
        2,
        until=20.0,
        processes=[process(LOAD, stacks="faulthandler", lacking="py-spy was not found")],
    )
    ((_, report),) = job.of(ReportStall)
    box = stall_box(report, Path("stacks-1.txt"), Names(INSTANCE))
    assert "[1] py-spy was not found: stacks have no frames of C, and threads no names" in box


def test_with_fail_fast_aborting_ends_all_instances() -> None:
    job = instances(action=ABORT, go_on=False)
    work(job, 0, 2, until=20.0)
    assert [len(job.sent(rank, End)) for rank in range(3)] == [1, 1, 1]


def test_an_instance_that_has_ended_is_not_waited_for() -> None:
    job = instances()
    job.exits(1)
    work(job, 0, 2, until=30.0)
    assert titles(job) == []


@pytest.mark.parametrize("timeout", [0.0, None])
def test_without_a_timeout_no_instance_counts_as_stalled(timeout: float | None) -> None:
    job = instances(timeout)
    job.until(1200.0)
    assert titles(job) == []


def none_was_ended(job: Played, *ranks: int) -> bool:
    return not any(job.sent(rank, End) for rank in ranks)
