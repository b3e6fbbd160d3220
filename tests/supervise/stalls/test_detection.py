"""Inquiries and reports about a stalled job, with a fake clock."""

from __future__ import annotations

from math import inf

import pytest
from support.played import running
from support.stalls import Job

from cpulaunch.ledger import STARTED
from cpulaunch.messages import AskDump, AskProgress, Beat, Dump, End
from cpulaunch.supervise.job.events import Action, ActOnStall, ReportStall, Send, Tell
from cpulaunch.supervise.job.rank import Rank, RankState
from cpulaunch.supervise.stalls.detection import AGAIN, DUE, LEAST, MIN_NATIVE, Stalls
from cpulaunch.supervise.stalls.inquiry import Inquiry
from cpulaunch.supervise.stalls.progress import ABORT, StallSettings


def test_a_stall_and_its_end_are_reported_once_each() -> None:
    job = Job(steps=5)
    job.until(200)
    assert job.reports == [pytest.approx(60, abs=DUE)]
    assert job.stalls.stalls[0].seconds == pytest.approx(60, abs=DUE)
    job.until(300)
    job.steps(1)
    job.until(320)
    assert job.told == ["the job continues, after 300 s without progress"]
    assert job.stalls.stalls[0].seconds == 300
    assert len(job.reports) == 1


def test_the_end_of_a_stall_is_reported_before_the_next_beat() -> None:
    job = Job(StallSettings(15), steps=1)
    job.until(33)
    job.steps(1)
    job.until(33 + AGAIN)
    assert job.told == ["the job continues, after 33 s without progress"]


def test_nothing_counts_as_a_stall_once_the_ranks_are_being_ended() -> None:
    job = Job(StallSettings(15), steps=1)
    job.until(14)
    job.stalls.end()
    job.until(60)
    assert job.reports == []


def test_a_second_stall_is_reported_and_auto_learns_from_the_first() -> None:
    job = Job(steps=5)
    job.until(100)
    job.steps(1, gap=100)
    job.until(1099)
    assert len(job.reports) == 1
    job.until(1110)
    assert job.reports[1] == pytest.approx(1100, abs=DUE)


def test_silent_agents_do_not_delay_the_report() -> None:
    job = Job(steps=1)
    job.answering, job.dumping = {0}, {0}
    job.until(100)
    assert job.reports == [pytest.approx(60, abs=DUE)]


@pytest.mark.parametrize("slow", [0.1, 0.4, 0.9, 1.3, 2.0, 9.0])
def test_slow_answers_do_not_make_the_report_late(slow: float) -> None:
    job = Job(StallSettings(15), steps=1)
    job.slow = slow
    job.until(30)
    (at,) = job.reports
    assert 15 <= at <= 15 + DUE


def test_a_slow_answer_that_reveals_the_stall_does_not_delay_the_report() -> None:
    job = Job(StallSettings(5), steps=1)
    job.slow = 1.3
    job.until(9)
    assert job.sent(AskProgress)[0] == 5
    assert job.reports == [pytest.approx(6.3 + 2 * LEAST)]


def test_a_stall_that_begins_just_after_a_beat_is_not_late() -> None:
    """Agents were asked before, and answered a moment later."""
    job = Job(StallSettings(5))
    job.slow = 0.2
    job.until(10.5)
    job.steps(7)
    job.until(30)
    (at,) = job.reports
    assert 15.5 <= at <= 15.5 + DUE


def test_a_late_launcher_gives_less_time_to_answers() -> None:
    job = Job(StallSettings(15), steps=1)
    job.until(14)
    job.dumping = {0}
    job.now = 16.1
    job.until(30)
    assert job.reports == [pytest.approx(15 + DUE - MIN_NATIVE)]


def test_answers_have_a_minimal_time_even_with_a_very_late_launcher() -> None:
    job = Job(StallSettings(15), steps=1)
    job.until(14)
    job.answering = job.dumping = {0}
    job.now = 19.0
    job.until(30)
    assert job.reports == [pytest.approx(19 + 2 * LEAST)]


def test_a_straggler_that_its_cgroup_throttles_is_reported_as_throttled() -> None:
    ranks = [Rank(n, f"node{n}", RankState.RUNNING) for n in range(2)]
    inquiry = Inquiry()
    stalls = Stalls(ranks, StallSettings(0), 0.0, inquiry)
    actions: list[Action] = []
    for window in range(3):
        for rank, waiting in zip(ranks, (1.0, 0.0), strict=True):
            beat = Beat(1 + 100 * window, 0, 0.1, waiting * window, True, 0, 1.0)
            actions += stalls.beat(rank, beat, 2.0 * window)
    (asked,) = actions
    assert isinstance(asked, Send)
    assert isinstance(asked.message, AskDump)
    assert asked.rank == 1
    process = {"pid": 7, "throttled": {"share": 0.47, "seconds": 3.0, "quota": 0.5}}
    dump = Dump(asked.message.request, 4.0, [], [process], "")
    inquiry.store_answer(1, dump, 4.0)
    assert stalls.handle_answer(ranks[1], 4.0) == [
        Tell(
            "node1 is slower than the others: 20 ms of computing per step, the others 10 ms, over 200 steps; "
            "its cgroup throttled it 47 % of the time"
        )
    ]


def test_abort_ends_all_ranks_and_names_the_awaited_rank() -> None:
    job = running(stalls=StallSettings(2, ABORT))
    for rank in range(4):
        job.says(rank, Beat(1, 1, 0.1, 0, True, 0, job.clock(rank)))
    job.beating.clear()
    job.until(7)
    assert job.of(ReportStall)
    assert all(job.sent(rank, End) for rank in range(4))
    job.obeys(0, 1, 2, 3)
    outcome = job.outcome()
    assert (outcome.kind, outcome.exit_code, len(outcome.stalls)) == ("stalled", 4, 1)
    assert outcome.first_failure
    assert (
        outcome.first_failure.error
        == f"no progress for {outcome.stalls[0].seconds:.0f} s: " + outcome.stalls[0].text
    )


def test_finished_programs_may_take_long_to_exit_while_they_are_active() -> None:
    job = Job(StallSettings(20, ABORT), steps=5)
    job.works_until = inf
    job.until(10)
    job.beats = [beat._replace(leaving=True) for beat in job.beats]
    job.ends(1)
    job.until(200)
    assert not job.reports
    job.works_until = job.now
    job.until(300)
    (report,) = job.of(ReportStall)
    assert report.explanation.headline == "rank 0 on node0 has finished, but doesn't exit"
    (acted,) = job.of(ActOnStall)
    assert acted.stall.ranks == (0,)


def test_a_rank_that_ends_while_another_waits_is_blamed_at_once() -> None:
    job = Job(StallSettings(20, ABORT), steps=5)
    job.works_until = inf
    job.called = {0: [], 1: ["barrier"]}
    job.beats[0] = job.beats[0]._replace(leaving=True)
    job.until(30)
    (acted,) = job.of(ActOnStall)
    assert acted.explanation.headline == "rank 0 on node0 has not called barrier #0"


@pytest.mark.parametrize(("finished", "kind", "code"), [(4, "ok", 0), (3, "stalled", 4)])
def test_a_stall_of_finished_programs_is_not_a_failure(finished: int, kind: str, code: int) -> None:
    """All programs had announced exit code 0 before the agents ended them."""
    job = running(stalls=StallSettings(2, ABORT))
    for rank in range(4):
        job.says(rank, Beat(1, 1, 0.1, 0, True, 0, job.clock(rank)))
    job.beating.clear()
    job.until(7)
    assert all(job.sent(rank, End) for rank in range(4))
    for rank in range(finished):
        job.exits(rank, 0)
    job.obeys(*range(finished, 4))
    outcome = job.outcome()
    assert (outcome.kind, outcome.exit_code, len(outcome.stalls)) == (kind, code, 1)
    assert (outcome.first_failure is None) == (kind == "ok")


def test_among_ranks_that_wait_for_each_other_none_is_the_first_failure() -> None:
    job = running("node0", "node1", stalls=StallSettings(4, ABORT))
    operation = {
        "sequence": 1, "state": STARTED, "kind": "recv", "type": "", "bytes": 0, "enqueued": 0.0, "started": 0.0,
        "completed": None, "peer": 0, "waits_for": "",
    }  # fmt: skip
    for rank in range(2):
        job.says(rank, Beat(1, 1, 0.1, 0, True, 0, job.clock(rank)))
    answered = 0
    while not job.state.ending:
        assert job.now < 20
        job.until(job.now + 0.25)
        for rank in range(2):
            for _, asked in job.sent(rank, AskDump)[answered:]:
                operations = [operation | {"peer": 1 - rank}]
                group = {"name": "0", "backend": "gloo", "size": 2, "rank": rank, "count": 1}
                groups = [{**group, "operations": operations}]
                job.says(rank, Dump(asked.request, job.clock(rank), groups, [], ""))
        answered = len(job.sent(1, AskDump))
    job.obeys(0, 1)
    outcome = job.outcome()
    (stall,) = outcome.stalls
    assert (stall.ranks, stall.text) == ((0, 1), "ranks 0-1 on node[0-1] wait for each other in messages")
    first = job.first_failure()
    assert (first.rank, first.host, first.file, first.line, first.disagree) == (None,) * 4 + (False,)
    assert first.note
    assert [line.partition(" in ")[0] for line in first.note.splitlines()] == [
        "rank 0 on node0 waits for rank 1",
        "rank 1 on node1 waits for rank 0",
    ]


def test_report_lets_the_job_run() -> None:
    job = running(stalls=StallSettings(4))
    for rank in range(4):
        job.says(rank, Beat(1, 1, 0.1, 0, True, 0, job.clock(rank)))
    while not job.of(ReportStall):
        assert job.now < 20
        job.until(job.now + 1)
    assert not job.state.ending
