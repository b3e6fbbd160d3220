"""The time without progress after which a job counts as stalled, with a fake clock."""

from __future__ import annotations

import pytest
from support.stalls import Job

from cpulaunch.messages import AskDump, AskProgress, Beat
from cpulaunch.supervise.stalls.detection import DUE
from cpulaunch.supervise.stalls.progress import StallSettings


def test_the_agents_of_a_job_that_makes_steps_are_never_asked() -> None:
    job = Job(steps=1)
    for second in range(300):
        job.until(float(second))
        job.steps(1)
    assert not job.done


def test_auto_uses_the_rank_with_the_shortest_gap() -> None:
    """The gaps between a rank's steps are at least as long as those between the job's steps."""
    job = Job()
    job.steps(1, 0, gap=30)
    job.steps(1, 1, gap=20)
    job.until(195)
    assert not job.reports
    job.until(210)
    assert job.reports == [pytest.approx(200, abs=DUE)]


def test_a_short_timeout_is_kept_although_beats_are_rare() -> None:
    job = Job(StallSettings(3), steps=7)
    job.until(9)
    (at,) = job.reports
    assert 3 <= at <= 3 + DUE


def test_a_stall_that_began_before_the_first_beat_is_not_late() -> None:
    job = Job(StallSettings(3))
    job.until(1)
    job.steps(7)
    job.until(9)
    assert job.reports == [pytest.approx(4, abs=0.3)]


def test_progress_of_one_rank_counts_as_progress_of_the_job() -> None:
    job = Job(steps=1)
    for second in range(0, 300, 20):
        job.until(float(second))
        job.steps(1, 1)
    assert not job.reports


def test_output_is_progress() -> None:
    job = Job(steps=1)
    for second in range(0, 300, 20):
        job.until(float(second))
        job.prints()
    assert not job.reports


def test_clocks_that_differ_change_nothing() -> None:
    job = Job(steps=1, ahead=5000)
    job.until(200)
    assert job.reports == [pytest.approx(60, abs=DUE)]


def test_progress_reported_only_by_the_answer_prevents_a_stall() -> None:
    job = Job(StallSettings(15), steps=1)
    job.until(14)  # the last beat came at 10
    job.steps(1)
    job.until(28)
    assert job.sent(AskProgress)
    assert not job.sent(AskDump)


def test_zero_means_never() -> None:
    job = Job(StallSettings(0), steps=1)
    job.until(1000)
    assert not job.done


def test_a_program_without_a_ledger_stalls_only_with_a_fixed_timeout() -> None:
    for settings, reports in ((StallSettings(None, ledgers=False), 0), (StallSettings(5, ledgers=False), 1)):
        job = Job(settings)
        job.beats = [Beat()] * 2
        job.until(300)
        assert len(job.reports) == reports


def test_the_launchers_own_suspension_does_not_count() -> None:
    job = Job(steps=1)
    job.until(20)
    job.now += 1000
    job.stalls.forgive(1000, job.now)
    job.until(1059)
    assert not job.reports
    job.until(1100)
    assert len(job.reports) == 1


def test_auto_ignores_gaps_in_which_the_job_was_suspended() -> None:
    job = Job(steps=5)
    job.until(20)
    job.now += 1000
    job.stalls.forgive(1000, job.now)
    job.steps(1, gap=1010)
    job.until(1200)
    assert job.reports == [pytest.approx(1020 + 10 * 10, abs=DUE)]
