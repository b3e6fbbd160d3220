"""The job's state machine, with a fake clock: the rules behind the table of failures."""

from __future__ import annotations

import gc
import sys
from signal import SIGINT, SIGKILL, SIGTERM

import pytest
from support.played import GRACE, SILENCE, Played, running

from cpulaunch import messages
from cpulaunch.supervise.job.events import AgentSent, Event, HideStderr, Log, ProcessPrinted, ShowStatus, Tick


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

    def test_has_the_error_of_its_first_report(self) -> None:
        job = running()
        job.raises(2, "ValueError: x")
        job.raises(2, "KeyError: y")
        job.exits(2, 1)
        job.obeys(0, 1, 3)
        first = job.first_failure()
        assert first.error == "ValueError: x"

    def test_is_the_cause_although_it_never_ends(self) -> None:
        job = running()
        job.raises(2, "ValueError: x")
        job.obeys(0, 1, 3)
        job.to_the_end()
        assert job.now == pytest.approx(2.0 + GRACE + 2)
        outcome = job.outcome()
        assert (outcome.kind, outcome.exit_code) == ("error", 1)
        assert [rank.status for rank in outcome.ranks][2] == "raised ValueError, killed by launcher"

    def test_has_raised_if_it_did_not_end_by_itself(self) -> None:
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


@pytest.mark.parametrize(
    "event",
    [
        Tick(),
        AgentSent(7, messages.Beat()),
        AgentSent(7, messages.Output(1, "x")),
        AgentSent(7, messages.Exit(0, None, 1.0, False, 0, None)),
        ProcessPrinted(b"a word of mpiexec"),
    ],
    ids=lambda event: str(event)[:40],
)
def test_the_cost_of_an_event_does_not_grow_with_the_ranks(event: Event) -> None:
    """The cost is counted in executed lines of the state machine."""

    def lines(ranks: int) -> int:
        job = Played([f"node{rank // 8}" for rank in range(ranks)])
        job.starts(*range(ranks))
        job.happens(Tick())
        count = 0

        def trace(*_: object) -> object:
            nonlocal count
            count += 1
            return trace

        gc.disable()  # finalizers of other tests' objects would count
        sys.settrace(trace)
        try:
            job.happens(event)
            job.happens(Tick())
        finally:
            sys.settrace(None)
            gc.enable()
        return count

    assert 0 < lines(2000) <= lines(16) + 10


class TestTheUser:
    def test_a_second_signal_kills_the_ranks(self) -> None:
        job = running()
        job.user_sends(SIGINT)
        assert not job.sent(0, messages.End)[0][1].failed  # there is a state to save
        job.until(2.5)
        job.user_sends(SIGINT)
        assert [(at, end.signal) for at, end in job.sent(0, messages.End)] == [(2.0, SIGINT), (2.5, SIGKILL)]
        job.to_the_end()
        assert job.now == pytest.approx(4.5)
        assert set(job.statuses()) == {"killed by launcher"}
        assert job.outcome().exit_code == 130

    def test_a_repeated_signal_does_not_delay_the_end(self) -> None:
        job = running()
        job.user_sends(SIGINT)
        job.until(4.5)
        job.user_sends(SIGINT)
        job.to_the_end()
        assert job.now == pytest.approx(2.0 + GRACE + 2)

    @pytest.mark.parametrize(("number", "kills"), [(SIGINT, False), (SIGTERM, True)])
    def test_a_signal_while_a_failure_ends_the_job(self, number: int, kills: bool) -> None:
        job = running()
        job.exits(2, 5)
        job.user_sends(number)
        signals = [end.signal for _, end in job.sent(0, messages.End)]
        assert signals == ([SIGTERM, SIGKILL] if kills else [SIGTERM])
        job.to_the_end()
        assert job.outcome().exit_code == 5


class TestRanksThatAreEnded:
    def test_are_named_if_they_took_long(self) -> None:
        job = running()
        job.exits(2, None, 9)
        job.obeys(0)
        job.until(4.5)
        job.obeys(1)
        job.falls_silent(3)
        job.to_the_end()
        (attempt,) = job.outcome().attempts
        assert (attempt.ended_after, attempt.waited) == (2.0, ("3 s until ranks 1,3 on node[1,3] had ended",))

    def test_are_asked_to_end_only_once(self) -> None:
        job = running()
        job.exits(2, 5)
        job.exits(1, 6)
        assert len(job.sent(0, messages.End)) == 1
        assert job.sent(0, messages.End)[0][1] == messages.End(SIGTERM, GRACE, failed=True)

    @pytest.mark.parametrize("says", [True, False], ids=["with a word", "without a word"])
    @pytest.mark.parametrize("mpiexec_first", [True, False])
    def test_that_end_with_a_killed_mpiexec_are_not_blamed(self, mpiexec_first: bool, says: bool) -> None:
        """When their parent dies, agents get SIGTERM from the kernel, or are killed as well."""
        job = running()
        if mpiexec_first:
            job.process_ends(-9)
        if says:
            job.exits(2, None, 15, by_signal=15)
        else:
            job.disconnects(2)
        if not mpiexec_first:
            job.process_ends(-9)
        job.to_the_end()
        first = job.first_failure()
        assert (first.rank, first.signal, job.outcome().exit_code) == (2, 9, 137)
        assert first.error == "mpiexec got SIGKILL, not from cpulaunch, and the rank's agent ended with it"

    def test_are_not_given_up_because_the_launcher_was_asleep(self) -> None:
        job = running()
        job.exits(2, 5)
        job.now = 100.0
        job.happens(Tick())
        assert not job.state.finished
        job.obeys(0, 1, 3)
        assert job.statuses()[0] == "ended by launcher"

    def test_whose_agents_end_silently_count_as_ended(self) -> None:
        job = running()
        job.exits(2, 5)
        for rank in (0, 1, 3):
            job.disconnects(rank)
        assert job.statuses() == ["ended by launcher", "ended by launcher", "exit 5", "ended by launcher"]
        assert [rank.rank for rank in job.state.untidy] == [0, 1, 3]

    def test_that_exit_with_0_are_reported_with_exit_code_0(self) -> None:
        job = running()
        job.exits(2, 5)
        job.exits(0, 0, by_launcher=True)
        assert job.statuses()[0] == "exit 0"


class TestMessages:
    def test_of_an_agent_that_refuses_to_start_fail_the_job(self) -> None:
        job = running()
        job.says(2, messages.Refused("rank 2 is planned on CPUs 1 of node2, but may use only 0"))
        assert job.sent(2, messages.Release)
        job.obeys(0, 1, 3)
        outcome, first = job.outcome(), job.first_failure()
        assert (outcome.kind, outcome.exit_code, first.rank) == ("start_failed", 3, 2)
        assert first.error == "rank 2 is planned on CPUs 1 of node2, but may use only 0"

    def test_about_a_signal_from_another_process_are_not_the_cause_if_there_is_another(self) -> None:
        """mpiexec ends all ranks when one of them has died."""
        job = running()
        job.exits(0, None, 15, by_signal=15, cause={"kind": "agent_signaled", "signal": 15})
        job.exits(2, None, 9)
        job.obeys(1, 3)
        first = job.first_failure()
        assert (first.rank, first.signal) == (2, 9)

    def test_of_an_unknown_kind_are_logged_and_reported_once(self) -> None:
        job = running()
        for rank in (1, 2, 2):
            job.says(rank, messages.Unknown("stall"))
        assert job.told == ["node1: the agent of rank 1 sent an unknown kind of message, 'stall'"]
        entries = [action.entry for _, action in job.of(Log) if action.entry["type"] == "stall"]
        assert [entry["rank"] for entry in entries] == [1, 2, 2]

    def test_that_are_invalid_close_the_connection(self) -> None:
        job = running()
        job.disconnects(2, "exit without code")
        job.obeys(0, 1, 3)
        first = job.first_failure()
        assert (first.rank, first.error) == (2, "its agent sent malformed data: exit without code")

    def test_with_notes_are_shown_with_their_host(self) -> None:
        job = running()
        job.says(1, messages.Note("a note"))
        job.says(1, messages.Note("another"))
        job.until(4.0)
        assert job.told == ["node1: a note", "node1: another"]

    def test_with_the_same_note_from_many_hosts_are_shown_as_one_line(self) -> None:
        job = Played([f"node{rank // 2}" for rank in range(2048)])
        for rank in range(2048):
            job.connects(rank)
            notes = [] if rank % 2 else ["/opt/my env/libtcmalloc.so is left out"]
            job.says(rank, messages.Started(7, "0", "", 1, notes))
            if rank % 512 == 0:
                job.until(job.now + 0.5)  # reports arrive this slowly
        job.until(job.now + 1.0)
        assert job.told == ["node[0-1023]: /opt/my env/libtcmalloc.so is left out"]

    def test_with_the_same_note_from_many_ranks_are_shown_as_one_line(self) -> None:
        job = running()
        for rank in range(4):
            job.says(rank, messages.Note(f"rank {rank} was given 4 threads, but torch has 2"))
        for rank in (1, 3):
            job.says(rank, messages.Note(f"rank {rank}: left"))
        job.exits(2, 1)
        job.obeys(0, 1, 3)
        assert job.told == [
            "node[0-3]: ranks 0-3 were given 4 threads, but torch has 2",
            "node[1,3]: ranks 1,3: left",
        ]

    def test_are_logged_except_secrets_beats_and_output(self) -> None:
        job = Played()
        job.connects(1)
        job.says(1, messages.Beat())
        job.says(1, messages.Output(1, "x"))
        job.now = 0.25
        job.exits(1, 3, cause={"kind": "killed"})
        hello, end = (dict(action.entry) for _, action in job.of(Log))
        assert hello.keys() == {"seconds", "rank", "type", "version", "at", "pid", "host"}
        assert end.pop("at") == job.clock(1)
        assert end == {
            "seconds": 0.25, "rank": 1, "type": "exit", "code": 3, "signal": None, "by_launcher": False,
            "by_signal": 0, "cause": {"kind": "killed"}, "unexplained": False, "groups": None, "threads": None,
            "finished": False,
        }  # fmt: skip

    def test_that_arrive_late_do_not_revive_a_rank(self) -> None:
        job = running()
        job.falls_silent(2)
        job.until(2.0 + SILENCE + 1.1)
        job.says(2, messages.Started(1, "0", "", 1, []))
        assert job.statuses()[2] == "lost"


def test_the_status_line_names_hosts_with_missing_ranks() -> None:
    job = Played()
    job.starts(0, 2)
    job.says(0, messages.Output(1, "x"))
    job.says(0, messages.Beat(steps=1200))
    job.until(3.0)
    assert (
        job.of(ShowStatus)[-1][1].text
        == "cpulaunch: 2 of 4 ranks up · node1 0/1, node3 0/1 · 3 s · step 1200 · last output 3 s ago"
    )


def test_saved_steps_count_although_the_agent_never_reported_them() -> None:
    """Agents end with mpiexec, before their next beat."""
    job = running()
    for rank in range(4):
        job.says(rank, messages.Resumed(100))
        job.says(rank, messages.Beat(steps=2, keeps_ledger=True))
    job.says(0, messages.Saved(110, leaves=False))
    job.exits(0, None, 9)
    job.obeys(1, 2, 3)
    job.to_the_end()
    (attempt,) = job.outcome().attempts
    assert (attempt.resumed_from, attempt.steps, attempt.reached) == (100, 10, 110)


@pytest.mark.parametrize(("saved", "kind"), [(False, "exit"), (True, "interrupted")])
def test_exit_code_75_means_a_saved_state_only_if_a_rank_reported_it(saved: bool, kind: str) -> None:
    job = running()
    if saved:
        job.says(0, messages.Saved(300, leaves=True))
    job.exits(0, 75)
    job.obeys(1, 2, 3)
    job.to_the_end()
    outcome = job.outcome()
    assert (outcome.kind, outcome.exit_code) == (kind, 75)
