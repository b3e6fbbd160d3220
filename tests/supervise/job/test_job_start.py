"""The job's state machine: agents that connect late or never, and the end of the launcher's processes."""

from __future__ import annotations

from signal import SIGINT, SIGTERM

import pytest
from support.played import GLOO, SSH, TIMEOUT, Played, running

from cpulaunch import messages
from cpulaunch.supervise.job.events import EndProcesses, NotStarted, StartFailed, Tick


class TestAnAgentThatNeverConnects:
    def test_is_reported_when_the_timeout_has_passed_since_the_others_connected(self) -> None:
        job = Played()
        job.until(30.0)
        assert not job.state.ending  # a big job takes its time
        job.starts(0, 1, 3)
        job.until(30.0 + TIMEOUT + 1.1)
        job.obeys(0, 1, 3)
        job.process_ends(0)
        job.to_the_end()
        outcome = job.outcome()
        assert (outcome.kind, outcome.exit_code) == ("start_failed", 3)
        first = job.first_failure()
        assert (first.rank, first.error) == (
            2,
            "its agent did not connect within 6 s after the last other rank",
        )

    def test_is_not_reported_missing_while_others_still_connect(self) -> None:
        """A thousand agents on a small machine need longer than the timeout."""
        job = Played()
        for rank in (0, 1, 3):
            job.starts(rank)
            job.until(job.now + TIMEOUT - 1)
        assert not job.state.ending

    def test_is_not_reported_missing_because_the_launcher_was_asleep(self) -> None:
        job = Played()
        job.starts(0, 1, 3)
        job.until(1.0)
        job.now = 100.0
        job.happens(Tick())
        assert not job.state.ending
        job.starts(2)
        job.until(120.0)
        assert not job.state.ending

    def test_is_reported_missing_a_second_after_its_end_if_the_launcher_started_it(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1, 3)
        job.until(0.5)
        job.process_ends(-9, number=2)
        job.until(1.4)
        assert not job.state.ending
        job.until(1.5)
        job.obeys(0, 1, 3)
        first = job.first_failure()
        assert (first.rank, first.error) == (2, "its agent ended before it connected to the launcher")

    def test_is_not_reported_missing_once_the_job_ends(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1, 3)
        job.process_ends(-9, number=2)
        job.raises(0, GLOO)
        job.until(2.5)
        assert job.state.ranks[2].failed is None
        job.exits(0, 1)
        job.obeys(1, 3)
        job.to_the_end()
        first = job.first_failure()
        assert first.error == GLOO

    def test_is_not_reported_missing_if_the_launcher_was_asleep_at_its_end(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1, 3)
        job.process_ends(-9, number=2)
        job.now = 100.0
        job.happens(Tick())
        assert not job.state.ending

    def test_is_not_reported_missing_if_its_hello_was_in_transit(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1, 3)
        job.process_ends(-9, number=2)
        job.until(0.5)
        job.starts(2)
        job.until(3.0)
        assert not job.state.ending

    def test_is_ended_if_it_connects_late(self) -> None:
        job = Played()
        job.starts(0, 1, 3)
        job.exits(0, 5)
        job.connects(2)
        assert [end.signal for _, end in job.sent(2, messages.End)] == [SIGTERM, SIGTERM]
        assert not job.of(EndProcesses)

    def test_if_no_other_connects_either_makes_the_launchers_processes_end(self) -> None:
        job = Played()
        job.until(1.0)
        job.user_sends(SIGINT)
        assert [at for at, _ in job.of(EndProcesses)] == [1.0]
        job.process_ends(130)
        job.to_the_end()
        outcome = job.outcome()
        assert (outcome.kind, outcome.exit_code) == ("interrupted", 130)
        assert {rank.status for rank in outcome.ranks} == {"not started"}

    def test_that_reports_on_stderr_that_it_cannot_connect_runs_unwatched(self) -> None:
        job = Played()
        job.process_says(f"[0] {messages.UNREACHED} at 10.0.0.9:1 (Connection refused): the job runs, but …")
        job.until(100.0)
        assert not job.state.ending
        job.process_ends(6)
        job.to_the_end()
        outcome = job.outcome()
        assert (outcome.kind, outcome.exit_code, outcome.first_failure) == ("exit", 6, None)
        assert {rank.status for rank in outcome.ranks} == {"not watched"}

    def test_that_cannot_connect_is_not_reported_missing_when_it_ends(self) -> None:
        job = Played(("localhost", "localhost"), launcher="local")
        job.process_says(f"[0] {messages.UNREACHED} at …")
        job.process_ends(0, number=0)
        job.until(20.0)
        assert not job.state.ending
        job.process_ends(-15, number=1)
        job.to_the_end()
        outcome = job.outcome()
        assert (outcome.kind, outcome.exit_code) == ("exit", 143)

    def test_that_could_not_be_started_is_the_cause_although_ssh_reports_late(self) -> None:
        job = Played()
        job.starts(0, 1, 3)
        job.until(3.0)
        job.raises(0, "ValueError: where is everybody?")
        job.until(4.0)
        job.process_says(SSH)
        job.exits(0, 1)
        job.obeys(1, 3)
        job.to_the_end()
        assert job.outcome().kind == "start_failed"

    def test_is_reported_with_the_first_known_reason(self) -> None:
        job = Played()
        job.starts(0, 1, 3)
        job.until(TIMEOUT + 1.1)
        job.process_says(SSH)
        job.obeys(0, 1, 3)
        job.to_the_end()
        first = job.first_failure()
        assert first.error == "its agent did not connect within 6 s after the last other rank"

    def test_that_has_another_version_is_refused(self) -> None:
        job = Played()
        job.starts(0, 1, 3)
        job.connects(2, version=messages.VERSION + 1)
        job.disconnects(2)  # as the launcher's loop would
        job.obeys(0, 1, 3)
        outcome = job.outcome()
        assert (outcome.kind, outcome.exit_code) == ("start_failed", 3)
        first = job.first_failure()
        assert (first.rank, first.host) == (2, "node2")
        assert f"has version {messages.VERSION + 1} of the control protocol" in str(first.error)
        assert job.statuses()[2] == "not started"


class TestAnAgentStartedByTheLauncher:
    def test_that_cannot_be_started_fails_the_job(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1)
        job.happens(StartFailed(2, "python can't be run: Resource temporarily unavailable"))
        job.happens(NotStarted(2))
        job.obeys(0, 1)
        outcome, first = job.outcome(), job.first_failure()
        assert (outcome.kind, outcome.exit_code, first.rank) == ("start_failed", 3, 2)
        assert first.error == "python can't be run: Resource temporarily unavailable"
        assert job.statuses()[2:] == ["not started", "not started"]

    def test_that_was_not_started_does_not_delay_the_end(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1)
        job.user_sends(SIGINT)
        job.happens(NotStarted(2))
        job.obeys(0, 1)
        assert job.state.finished
        assert job.statuses()[2:] == ["not started", "not started"]
        assert job.state.untidy == []

    def test_that_ended_early_is_the_last_agent_that_is_started(self) -> None:
        job = Played(launcher="local")
        job.process_ends(-9, number=0)
        job.until(1.0)
        job.happens(NotStarted(1))
        job.to_the_end()
        first = job.first_failure()
        assert (first.rank, first.error) == (0, "its agent ended before it connected to the launcher")

    def test_is_not_lost_on_a_busy_machine(self) -> None:
        """No network can fail, and the launcher would see the agent's end."""
        job = running("localhost", "localhost", launcher="local", here_alone=True)
        job.falls_silent(0, 1)
        job.until(100.0)
        assert not job.state.ending
        job.user_sends(SIGINT)
        job.to_the_end()
        assert job.statuses() == ["killed by launcher", "killed by launcher"]


class TestAProcessOfTheLauncherThatEnds:
    def test_early_fails_the_job_after_a_second(self) -> None:
        job = Played()
        job.starts(0)
        job.process_ends(-9)
        job.until(0.9)
        assert not job.state.ending
        job.to_the_end()
        assert job.now == pytest.approx(1.0)
        outcome, first = job.outcome(), job.first_failure()
        assert (outcome.kind, outcome.exit_code, first.rank) == ("start_failed", 3, 0)
        assert first.error == "mpiexec ended with code 137 before 4 of 4 ranks had ended"

    def test_leaves_a_second_for_messages_in_transit(self) -> None:
        job = running()
        job.process_ends(0)
        job.until(2.5)
        for rank in range(4):
            job.exits(rank, 0)
        assert job.outcome().kind == "ok"

    def test_does_not_matter_to_an_unfinished_job_under_local_while_others_run(self) -> None:
        job = running(launcher="local")
        job.exits(0, 0)
        job.process_ends(0, number=0)
        job.until(20.0)
        assert not job.state.ending
