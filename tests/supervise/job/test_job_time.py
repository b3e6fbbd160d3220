"""The job's state machine: silent hosts, and the clocks of other hosts."""

from __future__ import annotations

import itertools
from signal import SIGTERM

import pytest
from support.played import SILENCE, START, Played, running

from cpulaunch import messages
from cpulaunch.supervise.job.events import Tick
from cpulaunch.supervise.job.outcome import Failure
from cpulaunch.supervise.job.rank import RankState


class TestAHostThatFallsSilent:
    def test_is_lost_after_the_timeout_and_not_before(self) -> None:
        job = running()
        job.falls_silent(2)
        job.until(2.0 + SILENCE - 0.1)
        assert not job.state.ending
        job.until(2.0 + SILENCE + 1.1)
        assert job.state.ranks[2].state is RankState.LOST
        assert job.state.ending

    @pytest.mark.parametrize(
        ("host", "silent", "state"),
        [
            ("node1", True, RankState.LOST),
            ("node1", False, RankState.RUNNING),
            ("node2", True, RankState.RUNNING),
        ],
    )
    def test_loses_its_other_ranks_if_they_are_due_soon(
        self, host: str, silent: bool, state: RankState
    ) -> None:
        job = running("node0", "node1", host)
        job.falls_silent(1)
        job.until(4.9)
        if silent:  # the last beat is more than one interval old when the timeout of rank 1 ends
            job.falls_silent(2)
        job.until(2.0 + SILENCE + 1.1)
        assert [rank.state for rank in job.state.ranks][1:] == [RankState.LOST, state]

    def test_is_also_found_lost_after_the_grace_period(self) -> None:
        job = running()
        job.falls_silent(2)
        job.until(5.0)
        job.user_sends(SIGTERM)
        job.obeys(0, 1, 3)
        job.to_the_end()
        assert job.now < 2.0 + SILENCE + 1.1
        assert job.statuses()[2] == "lost"

    def test_is_the_cause_of_later_failures_that_are_seen_first(self) -> None:
        job = running()
        job.falls_silent(2)
        job.until(5.5)
        job.raises(0, "ValueError: the loss went up")
        job.exits(0, 1)
        job.obeys(1, 3)
        job.to_the_end()
        outcome, first = job.outcome(), job.first_failure()
        assert (outcome.kind, outcome.exit_code, first.host) == ("node_lost", 4, "node2")

    def test_is_not_lost_if_the_launcher_was_asleep(self) -> None:
        job = running()
        job.now = 100.0  # Ctrl-Z, and fg
        job.says(2, messages.Beat())
        job.happens(Tick())
        assert not job.state.ending
        job.falls_silent(2)
        job.until(100.0 + SILENCE + 1.1)
        assert job.state.ranks[2].state is RankState.LOST

    def test_is_not_lost_while_the_terminal_is_blocked(self) -> None:
        """Agents whose output isn't read can't send messages."""
        job = running()
        job.until(60.0, full=True)
        assert not job.state.ending
        job.falls_silent(2)
        job.until(60.0 + SILENCE + 1.1)
        assert job.state.ranks[2].state is RankState.LOST


class TestClocks:
    def fail(self, job: Played, first: int, then: int) -> Failure:
        """Two ranks fail one after the other, and the second one's report arrives first."""
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
            job.connects(rank, said=3.0 * rank)  # the time that their hellos waited to be read
            assert job.sent(rank, messages.AskTime)
            job.answers(rank, after=0.01)
        assert self.fail(job, first=0, then=3).rank == 0

    def test_are_compared_again_if_the_answer_took_long(self) -> None:
        job = Played()
        for rank in (0, 1, 3):
            job.connects(rank)
            job.answers(rank, after=0.01)
        job.connects(2)
        at = job.clock(2)
        job.now += 3.0  # the time that its answer waited to be read
        job.says(2, messages.Time(at))
        while len(job.sent(2, messages.AskTime)) < 2:
            job.until(job.now + 0.1)
        job.answers(2, after=0.01)
        assert self.fail(job, first=1, then=2).rank == 1

    def test_are_requested_less_often_if_answers_always_take_long(self) -> None:
        """The quickest answer counts.  Hosts on a slow network aren't asked every second for days."""
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
        job.answers(2, after=0.01)  # slower than the first answer
        assert self.fail(job, first=1, then=2).rank == 1

    def test_of_this_host_are_the_same(self) -> None:
        job = Played(hosts=("localhost",) * 4, launcher="local")
        job.ahead = dict.fromkeys(range(4), START - 2e9)
        for rank in range(4):
            job.connects(rank, said=3.0 * rank, here=True)
            assert not job.sent(rank, messages.AskTime)
        assert [rank.clock for rank in job.state.ranks] == [0.0] * 4
        assert self.fail(job, first=0, then=3).rank == 0
