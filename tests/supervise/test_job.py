"""The job's state machine, by a made-up clock: the rules behind the table of failures."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM

import pytest
from support.played import GLOO, GRACE, SSH, START, TIMEOUT, Played, running

import cpulaunch.supervise
from cpulaunch import messages
from cpulaunch.supervise.events import (
    AgentSaid,
    EndProcesses,
    Event,
    HideStderr,
    Log,
    NotStarted,
    ProcessSaid,
    ShowStatus,
    StartFailed,
    Tick,
)
from cpulaunch.supervise.outcome import Failure
from cpulaunch.supervise.rank import RankState


class TestARankThatRaises:
    def test_may_end_by_itself_for_a_second(self) -> None:
        job = running()
        job.raises(2, "ValueError: x")
        assert job.of(HideStderr) == [(2.0, HideStderr(2))]
        assert [at for at, _ in job.sent(0, messages.End)] == [2.0]
        job.until(2.9)
        assert not job.sent(2, messages.End)
        job.until(3.5)
        assert [(at, end.signal) for at, end in job.sent(2, messages.End)] == [(3.0, SIGTERM)]

    def test_is_taken_at_its_first_word(self) -> None:
        job = running()
        job.raises(2, "ValueError: x")
        job.raises(2, "KeyError: y")
        job.exits(2, 1)
        job.obeys(0, 1, 3)
        first = job.outcome().first_failure
        assert first
        assert first.error == "ValueError: x"

    def test_is_the_cause_though_it_never_ends(self) -> None:
        job = running()
        job.raises(2, "ValueError: x")
        job.obeys(0, 1, 3)
        job.to_the_end()
        assert job.now == pytest.approx(2.0 + GRACE + 2)
        outcome = job.outcome()
        assert (outcome.kind, outcome.exit_code) == ("error", 1)
        assert [rank.status for rank in outcome.ranks][2] == "raised ValueError, killed by launcher"

    def test_is_said_to_have_raised_where_it_did_not_end_by_itself(self) -> None:
        job = running()
        job.raises(2, "ValueError: x")
        job.raises(3, "KeyError: y", by_launcher=True)
        job.until(3.5)
        job.obeys(0, 1, 2, 3)
        assert job.statuses() == [
            "ended by launcher", "ended by launcher", "raised ValueError, ended by launcher", "ended by launcher",
        ]  # fmt: skip

    @pytest.mark.parametrize(("end", "code"), [({"code": 7}, 7), ({"code": None, "signal": 6}, 134)])
    def test_has_the_exit_code_that_it_ends_with(self, end: dict[str, int | None], code: int) -> None:
        job = running()
        job.raises(2, "ValueError: x")
        job.exits(2, **end)
        job.obeys(0, 1, 3)
        assert job.outcome().exit_code == code


class TestAHostThatFallsSilent:
    def test_is_lost_after_the_timeout_and_not_before(self) -> None:
        job = running()
        job.falls_silent(2)
        job.until(2.0 + TIMEOUT - 0.1)
        assert not job.state.ending
        job.until(2.0 + TIMEOUT + 1.1)
        assert job.state.ranks[2].state is RankState.LOST
        assert job.state.ending

    def test_takes_the_ranks_beside_along_that_are_due_soon(self) -> None:
        job = running("node0", "node1", "node1")
        job.falls_silent(1)
        job.until(4.9)
        job.falls_silent(2)  # more than a beat ago when the other's time is up
        job.until(2.0 + TIMEOUT + 1.1)
        assert [rank.state for rank in job.state.ranks][1:] == [RankState.LOST, RankState.LOST]

    def test_keeps_the_ranks_beside_that_are_still_heard(self) -> None:
        job = running("node0", "node1", "node1")
        job.falls_silent(1)
        job.until(2.0 + TIMEOUT + 1.1)
        assert [rank.state for rank in job.state.ranks][1:] == [RankState.LOST, RankState.RUNNING]

    def test_takes_no_rank_of_another_host_along_that_is_due_soon(self) -> None:
        job = running("node0", "node1", "node2")
        job.falls_silent(1)
        job.until(4.9)
        job.falls_silent(2)
        job.until(2.0 + TIMEOUT + 1.1)
        assert [rank.state for rank in job.state.ranks][1:] == [RankState.LOST, RankState.RUNNING]

    def test_is_found_lost_when_the_grace_is_over_too(self) -> None:
        job = running()
        job.falls_silent(2)
        job.until(5.0)
        job.user_sends(SIGTERM)
        job.obeys(0, 1, 3)
        job.to_the_end()
        assert job.now < 2.0 + TIMEOUT + 1.1
        assert job.statuses()[2] == "lost"

    def test_is_the_cause_of_what_happens_later_though_that_is_seen_first(self) -> None:
        job = running()
        job.falls_silent(2)
        job.until(5.5)
        job.raises(0, "ValueError: the loss went up")
        job.exits(0, 1)
        job.obeys(1, 3)
        job.to_the_end()
        outcome = job.outcome()
        first = outcome.first_failure
        assert first
        assert (outcome.kind, outcome.exit_code, first.host) == ("node_lost", 4, "node2")

    def test_is_not_at_fault_where_the_launcher_was_asleep(self) -> None:
        job = running()
        job.now = 100.0  # Ctrl-Z, and fg
        job.says(2, messages.Beat())
        job.happens(Tick())
        assert not job.state.ending
        job.falls_silent(2)
        job.until(100.0 + TIMEOUT + 1.1)
        assert job.state.ranks[2].state is RankState.LOST

    def test_is_not_at_fault_while_the_terminal_takes_nothing(self) -> None:
        """Agents whose output is not read can't be heard."""
        job = running()
        job.until(60.0, full=True)
        assert not job.state.ending
        job.falls_silent(2)
        job.until(60.0 + TIMEOUT + 1.1)
        assert job.state.ranks[2].state is RankState.LOST


class TestAnAgentThatNeverConnects:
    def test_is_missed_when_others_have_been_there_for_the_timeout(self) -> None:
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
        first = outcome.first_failure
        assert first
        assert (first.rank, first.error) == (2, "no sign of life within 6 s of the last rank's that has come")

    def test_is_not_missed_while_others_still_come(self) -> None:
        """A thousand agents on a small machine take longer than the timeout."""
        job = Played()
        for rank in (0, 1, 3):
            job.starts(rank)
            job.until(job.now + TIMEOUT - 1)
        assert not job.state.ending

    def test_is_not_missed_because_the_launcher_was_asleep(self) -> None:
        job = Played()
        job.starts(0, 1, 3)
        job.until(1.0)
        job.now = 100.0
        job.happens(Tick())
        assert not job.state.ending
        job.starts(2)
        job.until(120.0)
        assert not job.state.ending

    def test_is_missed_a_second_after_its_end_where_the_launcher_started_it(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1, 3)
        job.until(0.5)
        job.process_ends(-9, number=2)
        job.until(1.4)
        assert not job.state.ending
        job.until(1.5)
        job.obeys(0, 1, 3)
        first = job.outcome().first_failure
        assert first
        assert (first.rank, first.error) == (2, "its agent ended before it said hello")

    def test_is_not_missed_once_the_job_ends(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1, 3)
        job.process_ends(-9, number=2)
        job.raises(0, GLOO)
        job.until(2.5)
        assert job.state.ranks[2].failed is None
        job.exits(0, 1)
        job.obeys(1, 3)
        job.to_the_end()
        first = job.outcome().first_failure
        assert first
        assert first.error == GLOO

    def test_is_not_missed_where_the_launcher_was_asleep_when_it_ended(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1, 3)
        job.process_ends(-9, number=2)
        job.now = 100.0
        job.happens(Tick())
        assert not job.state.ending

    def test_is_not_missed_where_its_hello_was_on_its_way(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1, 3)
        job.process_ends(-9, number=2)
        job.until(0.5)
        job.starts(2)
        job.until(3.0)
        assert not job.state.ending

    def test_gets_the_end_that_it_has_missed(self) -> None:
        job = Played()
        job.starts(0, 1, 3)
        job.exits(0, 5)
        job.connects(2)
        assert [end.signal for _, end in job.sent(2, messages.End)] == [SIGTERM, SIGTERM]
        assert not job.of(EndProcesses)

    def test_leaves_the_launchers_processes_to_be_ended_where_there_is_no_agent_at_all(self) -> None:
        job = Played()
        job.until(1.0)
        job.user_sends(SIGINT)
        assert [at for at, _ in job.of(EndProcesses)] == [1.0]
        job.process_ends(130)
        job.to_the_end()
        outcome = job.outcome()
        assert (outcome.kind, outcome.exit_code) == ("interrupted", 130)
        assert {rank.status for rank in outcome.ranks} == {"not started"}

    def test_that_says_on_stderr_that_it_cannot_runs_unwatched(self) -> None:
        job = Played()
        job.process_says(f"[0] {messages.UNREACHED} at 10.0.0.9:1 (Connection refused): the job runs, but …")
        job.until(100.0)
        assert not job.state.ending
        job.process_ends(6)
        job.to_the_end()
        outcome = job.outcome()
        assert (outcome.kind, outcome.exit_code, outcome.first_failure) == ("exit", 6, None)
        assert {rank.status for rank in outcome.ranks} == {"not watched"}

    def test_that_cannot_is_not_missed_when_it_ends(self) -> None:
        job = Played(("localhost", "localhost"), launcher="local")
        job.process_says(f"[0] {messages.UNREACHED} at …")
        job.process_ends(0, number=0)
        job.until(20.0)
        assert not job.state.ending
        job.process_ends(-15, number=1)
        job.to_the_end()
        outcome = job.outcome()
        assert (outcome.kind, outcome.exit_code) == ("exit", 143)

    def test_that_could_not_be_started_is_the_cause_though_ssh_takes_its_time_to_say_so(self) -> None:
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

    def test_has_the_first_reason_that_is_known(self) -> None:
        job = Played()
        job.starts(0, 1, 3)
        job.until(TIMEOUT + 1.1)
        job.process_says(SSH)
        job.obeys(0, 1, 3)
        job.to_the_end()
        first = job.outcome().first_failure
        assert first
        assert first.error == "no sign of life within 6 s of the last rank's that has come"

    def test_that_speaks_another_version_is_not_heard(self) -> None:
        job = Played()
        job.starts(0, 1, 3)
        job.connects(2, version=messages.VERSION + 1)
        job.disconnects(2)  # by the loop
        job.obeys(0, 1, 3)
        outcome = job.outcome()
        assert (outcome.kind, outcome.exit_code) == ("start_failed", 3)
        first = outcome.first_failure
        assert first
        assert (first.rank, first.host) == (2, "node2")
        assert f"speaks version {messages.VERSION + 1} of the control protocol" in str(first.error)
        assert job.statuses()[2] == "not started"


class TestAnAgentOfOurs:
    def test_that_cannot_be_started_fails_the_job(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1)
        job.happens(StartFailed(2, "python can't be run: Resource temporarily unavailable"))
        job.happens(NotStarted(2))
        job.obeys(0, 1)
        outcome = job.outcome()
        first = outcome.first_failure
        assert first
        assert (outcome.kind, outcome.exit_code, first.rank) == ("start_failed", 3, 2)
        assert first.error == "python can't be run: Resource temporarily unavailable"
        assert job.statuses()[2:] == ["not started", "not started"]

    def test_that_was_not_started_is_not_waited_for(self) -> None:
        job = Played(launcher="local")
        job.starts(0, 1)
        job.user_sends(SIGINT)
        job.happens(NotStarted(2))
        job.obeys(0, 1)
        assert job.state.finished
        assert job.statuses()[2:] == ["not started", "not started"]
        assert job.state.untidy == []

    def test_that_ended_before_the_others_were_to_be_started_is_the_last(self) -> None:
        job = Played(launcher="local")
        job.process_ends(-9, number=0)
        job.until(1.0)
        job.happens(NotStarted(1))
        job.to_the_end()
        first = job.outcome().first_failure
        assert first
        assert (first.rank, first.error) == (0, "its agent ended before it said hello")

    def test_is_not_lost_where_the_machine_has_much_to_do(self) -> None:
        """There is no network that could be down, and the end of an agent would be seen."""
        job = running("localhost", "localhost", launcher="local", here_alone=True)
        job.falls_silent(0, 1)
        job.until(100.0)
        assert not job.state.ending
        job.user_sends(SIGINT)
        job.to_the_end()
        assert job.statuses() == ["killed by launcher", "killed by launcher"]


class TestClocks:
    def fail(self, job: Played, first: int, then: int) -> Failure:
        """Two ranks fail one after the other, and the second is heard first."""
        at = job.clock(first)
        job.now += 0.2
        job.exits(then, 6)
        job.exits(first, 5, at=at)
        job.obeys(*({0, 1, 2, 3} - {first, then}))
        failure = job.outcome().first_failure
        assert failure
        return failure

    def test_of_other_hosts_are_compared_by_a_question_and_its_answer(self) -> None:
        job = Played(ahead=(0.0, 100.0, -100.0, 0.0))
        for rank in range(4):
            job.connects(rank, said=3.0 * rank)  # so long have their hellos waited to be heard
            assert job.sent(rank, messages.AskTime)
            job.answers(rank, after=0.01)
        assert self.fail(job, first=0, then=3).rank == 0

    def test_are_compared_again_where_the_answer_took_long(self) -> None:
        job = Played()
        for rank in (0, 1, 3):
            job.connects(rank)
            job.answers(rank, after=0.01)
        job.connects(2)
        at = job.clock(2)
        job.now += 3.0  # so long has its answer waited to be heard
        job.says(2, messages.Time(at))
        while len(job.sent(2, messages.AskTime)) < 2:
            job.until(job.now + 0.1)
        job.answers(2, after=0.01)
        assert self.fail(job, first=1, then=2).rank == 1

    def test_are_asked_for_ever_more_seldom_where_answers_always_take_long(self) -> None:
        """The quickest answer counts, and a slow network isn't asked every second for days."""
        job = Played()
        job.connects(0, 1, 2, 3)
        for rank in (0, 1, 3):
            job.answers(rank, after=0.01)
        took = {number: 0.2 + 0.1 * (number % 7) for number in range(100)}
        answered = 0
        while job.now < 3600.0:
            if len(job.sent(2, messages.AskTime)) > answered:
                job.answers(2, after=took[answered])
                answered += 1
            job.until(job.now + 0.5)
        assert 60 <= answered <= 75
        assert job.state.ranks[2].round_trip == pytest.approx(0.2)
        first = [at for at, _ in job.sent(2, messages.AskTime)][:8]
        gaps = [later - earlier for earlier, later in itertools.pairwise(first)]
        assert gaps == sorted(gaps)

    def test_are_compared_again_after_ten_minutes_as_they_drift(self) -> None:
        job = Played()
        job.connects(0, 1, 2, 3)
        for rank in range(4):
            job.answers(rank, after=0.001)
        job.ahead[2] = 5.0
        while len(job.sent(2, messages.AskTime)) < 2:
            job.until(job.now + 1.0)
        job.answers(2, after=0.01)  # which took longer than the first time
        assert self.fail(job, first=1, then=2).rank == 1

    def test_of_this_host_are_the_same(self) -> None:
        job = Played(hosts=("localhost",) * 4, launcher="local")
        job.ahead = dict.fromkeys(range(4), START - 2e9)
        for rank in range(4):
            job.connects(rank, said=3.0 * rank, here=True)
            assert not job.sent(rank, messages.AskTime)
        assert [rank.clock for rank in job.state.ranks] == [0.0] * 4
        assert self.fail(job, first=0, then=3).rank == 0


@pytest.mark.parametrize(
    "event",
    [
        Tick(),
        AgentSaid(7, messages.Beat()),
        AgentSaid(7, messages.Output(1, "x")),
        AgentSaid(7, messages.Exit(0, None, 1.0, False, 0, None)),
        ProcessSaid(b"a word of mpiexec"),
    ],
    ids=lambda event: str(event)[:40],
)
def test_what_happens_to_one_rank_costs_no_more_where_there_are_many(event: Event) -> None:
    """Counted in lines of the state machine."""

    def lines(ranks: int) -> int:
        job = Played([f"node{rank // 8}" for rank in range(ranks)])
        job.starts(*range(ranks))
        job.happens(Tick())
        count = 0

        def trace(*_: object) -> object:
            nonlocal count
            count += 1
            return trace

        sys.settrace(trace)
        try:
            job.happens(event)
            job.happens(Tick())
        finally:
            sys.settrace(None)
        return count

    assert 0 < lines(2000) <= lines(16) + 10


class TestAProcessOfTheLauncherThatEnds:
    def test_early_fails_the_job_after_a_second(self) -> None:
        job = Played()
        job.starts(0)
        job.process_ends(-9)
        job.until(0.9)
        assert not job.state.ending
        job.to_the_end()
        assert job.now == pytest.approx(1.0)
        outcome = job.outcome()
        first = outcome.first_failure
        assert first
        assert (outcome.kind, outcome.exit_code, first.rank) == ("start_failed", 3, 0)
        assert first.error == "mpiexec ended with code 137 before 4 of 4 ranks had reported"

    def test_leaves_a_second_for_what_is_on_its_way(self) -> None:
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


class TestTheUser:
    def test_who_asks_twice_has_the_ranks_killed(self) -> None:
        job = running()
        job.user_sends(SIGINT)
        job.until(2.5)
        job.user_sends(SIGINT)
        assert [(at, end.signal) for at, end in job.sent(0, messages.End)] == [(2.0, SIGINT), (2.5, SIGKILL)]
        job.to_the_end()
        assert job.now == pytest.approx(4.5)
        assert set(job.statuses()) == {"killed by launcher"}
        assert job.outcome().exit_code == 130

    def test_who_asks_again_does_not_put_off_the_end(self) -> None:
        job = running()
        job.user_sends(SIGINT)
        job.until(4.5)
        job.user_sends(SIGINT)
        job.to_the_end()
        assert job.now == pytest.approx(2.0 + GRACE + 2)

    @pytest.mark.parametrize(("number", "kills"), [(SIGINT, False), (SIGTERM, True)])
    def test_who_asks_while_a_failure_ends_the_job(self, number: int, kills: bool) -> None:
        job = running()
        job.exits(2, 5)
        job.user_sends(number)
        signals = [end.signal for _, end in job.sent(0, messages.End)]
        assert signals == ([SIGTERM, SIGKILL] if kills else [SIGTERM])
        job.to_the_end()
        assert job.outcome().exit_code == 5


class TestRanksThatAreEnded:
    def test_are_asked_once(self) -> None:
        job = running()
        job.exits(2, 5)
        job.exits(1, 6)
        assert len(job.sent(0, messages.End)) == 1
        assert job.sent(0, messages.End)[0][1] == messages.End(SIGTERM, GRACE)

    def test_are_given_up_two_seconds_after_the_grace(self) -> None:
        job = running()
        job.exits(2, 5)
        job.until(2.0 + GRACE + 1.9)
        assert not job.state.finished
        job.to_the_end()
        assert job.now == pytest.approx(2.0 + GRACE + 2)
        assert job.statuses() == ["killed by launcher", "killed by launcher", "exit 5", "killed by launcher"]

    @pytest.mark.parametrize("mpiexec_first", [True, False])
    def test_that_end_with_an_mpiexec_that_was_killed_are_not_blamed(self, mpiexec_first: bool) -> None:
        job = running()
        if mpiexec_first:
            job.process_ends(-9)
        job.disconnects(2)
        if not mpiexec_first:
            job.process_ends(-9)
        job.to_the_end()
        first = job.outcome().first_failure
        assert first
        assert first.error == "mpiexec got SIGKILL, not from us, and its agent ended with it"

    def test_are_not_given_up_because_the_launcher_was_asleep(self) -> None:
        job = running()
        job.exits(2, 5)
        job.now = 100.0
        job.happens(Tick())
        assert not job.state.finished
        job.obeys(0, 1, 3)
        assert job.statuses()[0] == "ended by launcher"

    def test_whose_agents_go_without_a_word_count_as_ended(self) -> None:
        job = running()
        job.exits(2, 5)
        for rank in (0, 1, 3):
            job.disconnects(rank)
        assert job.statuses() == ["ended by launcher", "ended by launcher", "exit 5", "ended by launcher"]
        assert [rank.rank for rank in job.state.untidy] == [0, 1, 3]

    def test_with_exit_code_0_say_so(self) -> None:
        job = running()
        job.exits(2, 5)
        job.exits(0, 0, by_launcher=True)
        assert job.statuses()[0] == "exit 0"


class TestMessages:
    def test_of_an_agent_that_refuses_fail_the_start(self) -> None:
        job = running()
        job.says(2, messages.Refused("rank 2 is planned on CPUs 1 of node2, but may use only 0"))
        assert job.sent(2, messages.Release)
        job.obeys(0, 1, 3)
        outcome = job.outcome()
        first = outcome.first_failure
        assert first
        assert (outcome.kind, outcome.exit_code, first.rank) == ("start_failed", 3, 2)
        assert first.error == "rank 2 is planned on CPUs 1 of node2, but may use only 0"

    def test_of_somebody_elses_signal_are_no_cause_where_there_is_another(self) -> None:
        """mpiexec ends all ranks when one has died."""
        job = running()
        job.exits(0, None, 15, by_signal=15, note="its agent got signal 15")
        job.exits(2, None, 9)
        job.obeys(1, 3)
        first = job.outcome().first_failure
        assert first
        assert (first.rank, first.signal) == (2, 9)

    def test_of_an_unknown_kind_are_logged_and_told_once(self) -> None:
        job = running()
        for rank in (1, 2, 2):
            job.says(rank, messages.Unknown("stall"))
        assert job.told == ["node1: the agent of rank 1 sent a message of an unknown kind, 'stall'"]
        entries = [action.entry for _, action in job.of(Log) if action.entry["type"] == "stall"]
        assert [entry["rank"] for entry in entries] == [1, 2, 2]

    def test_that_are_none_cost_the_rank_its_connection(self) -> None:
        job = running()
        job.disconnects(2, "exit without code")
        job.obeys(0, 1, 3)
        first = job.outcome().first_failure
        assert first
        assert (first.rank, first.error) == (2, "the launcher can't understand its agent: exit without code")

    def test_with_notes_are_shown_with_their_host(self) -> None:
        job = Played()
        job.connects(1)
        job.says(1, messages.Started(7, "0", "", 1, ["a note"]))
        job.says(1, messages.Note("another"))
        assert job.told == ["node1: a note", "node1: another"]

    def test_are_logged_but_for_secrets_beats_and_output(self) -> None:
        job = Played()
        job.connects(1)
        job.says(1, messages.Beat())
        job.says(1, messages.Output(1, "x"))
        job.now = 0.25
        job.exits(1, 3, note="n")
        hello, end = (dict(action.entry) for _, action in job.of(Log))
        assert hello.keys() == {"seconds", "rank", "type", "version", "at", "pid", "host"}
        assert end.pop("at") == job.clock(1)
        assert end == {
            "seconds": 0.25, "rank": 1, "type": "exit", "code": 3, "signal": None, "by_launcher": False,
            "by_signal": 0, "note": "n",
        }  # fmt: skip

    def test_that_come_late_do_not_revive_a_rank(self) -> None:
        job = running()
        job.falls_silent(2)
        job.until(2.0 + TIMEOUT + 1.1)
        job.says(2, messages.Started(1, "0", "", 1, []))
        assert job.statuses()[2] == "lost"


def test_the_status_line_names_hosts_that_miss_ranks() -> None:
    job = Played()
    job.starts(0, 2)
    job.says(0, messages.Output(1, "x"))
    job.until(3.0)
    assert (
        job.of(ShowStatus)[-1][1].text
        == "cpulaunch: 2 of 4 ranks up · node1 0/1, node3 0/1 · 3 s · last output 3 s ago"
    )


@pytest.mark.parametrize("module", ["job", "events", "processes", "rank", "root_cause", "status"])
def test_the_state_machine_has_no_clock_socket_signal_or_process(module: str) -> None:
    package = Path(cpulaunch.supervise.__file__ or "").parent
    imported: set[str] = set()
    for node in ast.walk(ast.parse((package / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "signal":
            assert all(alias.name.startswith("SIG") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
    assert imported <= {
        "__future__", "collections", "collections.abc", "dataclasses", "enum", "heapq", "itertools", "math", "re",
        "typing",
        "cpulaunch", "cpulaunch.errors", "cpulaunch.messages", "cpulaunch.launchers.base",
        *(f"cpulaunch.supervise{part}" for part in ("", ".events", ".outcome", ".processes", ".rank", ".root_cause", ".status")),
    }  # fmt: skip
