"""Stalls before the first step, and the reactions to them, with a fake clock."""

from __future__ import annotations

from math import inf

import pytest
from support.stalls import Job

from cpulaunch.messages import Beat
from cpulaunch.supervise.job.events import ActOnStall, ReportStall
from cpulaunch.supervise.output.stall_box import title
from cpulaunch.supervise.stalls.detection import DUE
from cpulaunch.supervise.stalls.progress import ABORT, FEW, StallSettings


def test_no_stall_counts_before_the_first_step() -> None:
    job = Job(StallSettings(3))
    job.beats = [Beat(0, 12, 0.1, 0, True, 100, 1.0)] * 2  # DDP has broadcast the model
    job.until(100)
    assert not job.reports


@pytest.mark.parametrize(
    ("timeout", "due", "said"),
    [
        (
            20,
            35.0,
            "before the first step, --stall-action abort ends the job once rank 0 uses no CPU for 20 s",
        ),
        (
            None,
            615.0,
            "the job goes on: with --stall-timeout auto, --stall-action abort ends it only after the first step",
        ),
    ],
)
def test_before_the_first_step_a_wait_for_others_is_reported_once_it_has_lasted(
    timeout: float | None, due: float, said: str
) -> None:
    job = Job(StallSettings(timeout, ABORT), ahead=5000)
    job.until(15)
    job.waits(1)
    job.works_until = inf
    job.until(2 * due)
    assert job.reports == [pytest.approx(due, abs=DUE)]
    (report,) = job.of(ReportStall)
    assert report.begun is False
    assert report.explanation.advice == said
    assert not job.of(ActOnStall)
    assert title(report) == (
        f"no progress for {due - 15:.0f} s, before the first step: rank 0 on node0 has not called init_process_group"
    )
    assert report.stall.at == 15  # the start of the wait


def test_before_the_first_step_an_idle_rank_is_ended_but_not_an_active_rank() -> None:
    job = Job(StallSettings(20, ABORT))
    job.waits(1)
    job.works_until = inf
    job.until(90)
    assert job.told == ["rank 0 is at work: --stall-action abort doesn't end the job; Ctrl-C does"]
    assert not job.of(ActOnStall)
    job.works_until = job.now
    job.until(200)
    # The rank worked for a part of the time before the next inspection, but not before the one after that.
    (acted,) = (at for at, action in job.done if isinstance(action, ActOnStall))
    assert acted == pytest.approx(120, abs=10)
    assert len(job.reports) == 1
    assert job.stalls.stalls[0].seconds == pytest.approx(acted, abs=1)


def test_a_rank_that_continues_before_the_second_inspection_is_not_ended() -> None:
    job = Job(StallSettings(20, ABORT))
    job.waits(1)
    job.until(30)
    job.prints()
    job.until(35)
    assert job.reports
    assert not job.of(ActOnStall)
    assert job.told == ["the job continues, after 30 s without progress"]


def test_steps_after_a_late_start_are_seen_although_inspections_delay_the_beats() -> None:
    job = Job(StallSettings(3, ABORT))
    job.waits(1)
    job.works_until = inf
    job.until(10)
    assert [report.begun for report in job.of(ReportStall)] == [False]
    job.beats[1] = job.beats[1]._replace(waits_since=None)
    job.steps(5)
    job.called = {0: [], 1: ["all_reduce"]}
    job.until(25)
    assert job.told[-1].startswith("the job continues, after ")
    assert [report.begun for report in job.of(ReportStall)] == [False, True]
    assert len(job.of(ActOnStall)) == 1


def test_before_the_first_step_the_rank_that_is_waited_for_last_is_blamed() -> None:
    """Rank 0 was late, and was reported.  Then it calls a barrier that rank 1 never joins."""
    job = Job(StallSettings(20, ABORT))
    job.waits(1)
    job.works_until = inf
    job.until(70)
    assert len(job.reports) == 1
    job.works_until = job.now
    job.waits(0)
    job.until(85)  # an inspection finds both in init_process_group
    assert len(job.reports) == 1
    job.beats[1] = job.beats[1]._replace(waits_since=None)
    job.called, job.lines = {0: ["barrier"], 1: []}, [1, 7]
    job.until(200)
    reports = job.of(ReportStall)
    assert [report.number for report in reports] == [1, 2]
    assert reports[1].explanation.headline == "rank 1 on node1 has not called barrier #0"
    assert reports[1].explanation.advice.endswith(" ends the job once rank 1 uses no CPU for 20 s")
    (acted,) = job.of(ActOnStall)
    assert (acted.stall.ranks, acted.stall.operation, acted.stall.line) == ((1,), "barrier", 7)
    assert [stall.ranks for stall in job.stalls.stalls] == [(0,), (1,)]


def test_before_the_first_step_the_line_is_from_the_last_inspection() -> None:
    job = Job(StallSettings(20, ABORT))
    job.waits(1)
    job.works_until = 50
    job.until(45)
    assert job.told == ["rank 0 is at work: --stall-action abort doesn't end the job; Ctrl-C does"]
    job.lines[0] = 9
    job.until(100)
    (acted,) = job.of(ActOnStall)
    assert acted.stall.line == 9
    shown = [action.stall.line for action in job.of(ReportStall)]
    assert shown == [1, 9]


def test_before_the_first_step_a_wait_that_has_ended_is_not_a_stall() -> None:
    job = Job(StallSettings(20, ABORT))
    job.waits(1)
    job.until(25)
    assert len(job.reports) == 1
    job.beats[1] = job.beats[1]._replace(waits_since=None)
    job.until(200)
    assert len(job.reports) == 1
    assert not job.of(ActOnStall)
    assert len(job.told) == 1
    assert job.told[0].startswith("the job continues, after ")
    assert not job.stalls.describe(job.now)


def test_before_the_first_step_ranks_that_all_make_a_group_are_inspected_again() -> None:
    job = Job(StallSettings(20, ABORT))
    job.waits(0)
    job.waits(1)
    job.until(100)
    (report,) = job.of(ReportStall)
    assert report.explanation.headline == "all have called init_process_group, but it has not completed"
    assert report.explanation.advice == (
        "the job goes on: before the first step, --stall-action abort ends it only if the others wait for a "
        "rank that uses no CPU"
    )
    assert not job.told
    job.beats[1] = job.beats[1]._replace(waits_since=None)
    job.called, job.lines = {0: ["barrier"], 1: []}, [1, 7]
    job.until(150)
    (acted,) = job.of(ActOnStall)
    assert (acted.stall.ranks, acted.stall.line) == ((1,), 7)


@pytest.mark.parametrize("timeout", [20, None])
def test_before_the_first_step_the_end_of_an_active_rank_is_inspected(timeout: float | None) -> None:
    job = Job(StallSettings(timeout, ABORT))
    job.waits(1)
    job.works_until = inf
    job.until(650 if timeout is None else 50)
    assert not job.of(ActOnStall)
    job.ends(0)
    job.until(job.now + DUE)
    (acted,) = job.of(ActOnStall)
    assert (
        acted.explanation.headline == "rank 0 on node0 has left (exit 0) without calling init_process_group"
    )


def test_a_rank_that_starts_late_is_waited_for() -> None:
    job = Job(StallSettings(20))
    job.waits(0)
    job.until(15)
    job.stalls.add_progress(job.ranks[0], 15)
    job.until(60)
    assert job.reports == [pytest.approx(35, abs=DUE)]


def test_collectives_count_if_no_rank_has_an_optimizer() -> None:
    job = Job(StallSettings(3))
    job.beats = [Beat(0, 12, 0.1, 0, False, 0, 1.0)] * 2
    job.until(100)
    assert len(job.reports) == 1


def few(count: int) -> list[Beat]:
    """Return the beats of a job that has no optimizer yet, and has completed some collectives."""
    return [Beat(0, count, 0.1, 0, False, 0, 1.0)] * 2


@pytest.mark.parametrize(("count", "reported"), [(1, False), (FEW + 1, True)])
def test_ranks_that_compute_after_a_first_barrier_are_before_their_first_step(
    count: int, reported: bool
) -> None:
    """The ranks compile, and make their optimizer afterwards."""
    job = Job(StallSettings(20, ABORT))
    job.slow, job.works_until = 0.3, inf
    job.beats = few(count)
    job.until(150)
    assert bool(job.reports) == bool(job.of(ActOnStall)) == reported


@pytest.mark.parametrize("worker", [0, 1])
def test_a_rank_that_computes_elsewhere_is_before_the_first_step(worker: int) -> None:
    """The other rank sleeps at another line, and neither waits for the other."""
    job = Job(StallSettings(20, ABORT))
    job.slow, job.works_until, job.worker = 0.3, inf, worker
    job.beats, job.called, job.lines = few(1), {0: [], 1: []}, [1, 7]
    job.until(150)
    assert not job.reports


@pytest.mark.parametrize(
    ("state", "throttled", "reported"), [("R", 0.0, False), ("S", 0.0, True), ("R", 0.9, True)]
)
def test_a_runnable_rank_without_a_core_is_before_the_first_step(
    state: str, throttled: float, reported: bool
) -> None:
    """A rank that its cgroup throttles is reported as throttled."""
    job = Job(StallSettings(20, ABORT))
    job.slow, job.states, job.beats, job.throttled = 0.3, ["S", state], few(1), throttled
    job.until(150)
    assert bool(job.reports) == reported


def test_the_timeout_counts_from_the_start_of_a_job_that_began_later() -> None:
    job = Job(StallSettings(20, ABORT))
    job.slow, job.works_until = 0.3, inf
    job.beats = few(1)
    job.until(100)
    job.works_until = job.now
    job.steps(1)
    job.until(150)
    assert job.reports == [pytest.approx(120, abs=DUE)]
    assert job.of(ActOnStall)


def test_an_awaited_rank_that_computes_after_a_first_barrier_is_before_its_first_step() -> None:
    job = Job(StallSettings(20, ABORT))
    job.slow, job.works_until = 0.3, inf
    job.beats = few(1)
    job.beats[1] = job.beats[1]._replace(waits_since=1.0)
    job.called = {0: [], 1: ["barrier"]}
    job.until(100)
    (report,) = job.of(ReportStall)
    assert not report.begun
    assert report.explanation.headline == "rank 0 on node0 has not called barrier #0"
    assert not job.of(ActOnStall)


def test_programs_that_finished_after_few_collectives_are_not_at_their_start() -> None:
    job = Job(StallSettings(20, ABORT))
    job.slow, job.works_until = 0.3, 60
    job.beats = [beat._replace(leaving=True) for beat in few(1)]
    job.until(150)
    (report,) = job.of(ReportStall)
    assert report.explanation.headline == "all ranks have finished, but don't exit"
