"""When a job counts as stalled, and what its agents are asked then, by a made-up clock."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
from support.played import running

from cpulaunch.ledger import MEETING, STARTED
from cpulaunch.messages import AskDump, AskProgress, Beat, Dump, End, Exit, LauncherMessage
from cpulaunch.supervise.events import Action, ActOnStall, ReportStall, Send, Tell
from cpulaunch.supervise.pauses import ABORT, FEW, StallSettings
from cpulaunch.supervise.rank import Rank, RankState
from cpulaunch.supervise.stall_box import title
from cpulaunch.supervise.stalls import DUE, LEAST, MIN_NATIVE, Stalls

AUTO = StallSettings()
BEAT = 10.0
"""Seconds between beats."""


class Job:
    """Two ranks whose agents beat and answer, until they are told not to; what they do is in ``beats``.

    Answers come ``slow`` seconds after their question.
    """

    def __init__(self, settings: StallSettings = AUTO, steps: int = 0, ahead: float = 0.0) -> None:
        self.ranks = [Rank(0, "node0", RankState.RUNNING), Rank(1, "node1", RankState.RUNNING, clock=-ahead)]
        self.now, self.ahead = 0.0, ahead
        self.stalls = Stalls(self.ranks, settings, 0.0)
        self.beats = [Beat(expects_steps=True) for _ in self.ranks]
        self.answering, self.dumping = {0, 1}, {0, 1}
        self.slow = 0.0
        self.called: dict[
            int, list[str]
        ] = {}  # what ranks have called in group 0 and wait in, if they are in it
        self.lines = [1, 1]  # of train.py, at which ranks are
        self.works_until = 1.0  # rank 0 uses the CPU all the time up to then
        self.done: list[tuple[float, Action]] = []
        self._on_the_way: list[tuple[float, Rank, LauncherMessage]] = []
        self._beat_at = BEAT
        if steps:
            self.steps(steps)

    def steps(self, count: int, *ranks: int, gap: float = 0.1) -> None:
        """Ranks have made so many more steps just now."""
        for rank in ranks or (0, 1):
            before, at = self.beats[rank], self.now + self.ahead * rank
            self.beats[rank] = before._replace(
                steps=before.steps + count, progressed_at=at, longest_gap=max(before.longest_gap, gap)
            )

    def waits(self, rank: int) -> None:
        """It has called ``init_process_group`` just now."""
        self.beats[rank] = self.beats[rank]._replace(waits_since=self.now + self.ahead * rank)

    def until(self, moment: float) -> None:
        while self.now < moment:
            due = [at for at, *_ in self._on_the_way]
            self.now = max(self.now, min(moment, self.now + 0.25, self.stalls.wake_at or moment, *due))
            come = [each for each in self._on_the_way if each[0] <= self.now]
            self._on_the_way = [each for each in self._on_the_way if each not in come]
            for _, rank, message in come:
                self._answer(rank, message)
            if self.now >= self._beat_at:
                self._beat_at += BEAT
                for rank in self.ranks:
                    self._act(self.stalls.beat(rank, self.beats[rank.rank], self.now))
            self._act(self.stalls.look(self.now))

    def prints(self) -> None:
        self._act(self.stalls.printed(self.ranks[0], self.now))

    def ends(self, number: int) -> None:
        """With exit code 0."""
        rank = self.ranks[number]
        rank.state, rank.exit = RankState.EXITED, Exit(0, None, self.now, False, 0, None)
        self._act(self.stalls.ended(rank, self.now))

    def _act(self, actions: Sequence[Action]) -> None:
        self.done += [(self.now, action) for action in actions]
        for action in actions:
            if isinstance(action, Send) and self.slow:
                rank = self.ranks[action.rank]
                self._on_the_way.append((self.now + self.slow, rank, action.message))
            elif isinstance(action, Send):
                self._answer(self.ranks[action.rank], action.message)

    def _answer(self, rank: Rank, message: LauncherMessage) -> None:
        if isinstance(message, AskProgress) and rank.rank in self.answering:
            self._act(self.stalls.beat(rank, self.beats[rank.rank], self.now))
        elif isinstance(message, AskDump) and rank.rank in self.dumping:
            since = self.beats[rank.rank].waits_since
            operation = {
                "sequence": 0, "state": STARTED, "kind": MEETING, "type": "", "bytes": 0, "enqueued": since,
                "started": since, "completed": None, "peer": -1, "waits_for": "",
            }  # fmt: skip
            group = {"name": "", "backend": "", "size": 2, "rank": rank.rank, "count": 1}
            groups = [{**group, "operations": [operation]}] if since is not None else []
            if (called := self.called.get(rank.rank)) is not None:
                operations = [{**operation, "kind": kind} for kind in called]
                groups = [{**group, "name": "0", "backend": "gloo", "operations": operations}]
            cpu = 1.0 if rank.rank else min(self.now, self.works_until)
            frames = [["load", "/home/me/train.py", self.lines[rank.rank]]]
            thread = {
                "id": 1,
                "name": "MainThread",
                "gil": False,
                "idle": True,
                "frames": frames,
                "left_out": 0,
            }
            program = {
                "pid": 1000 + rank.rank,
                "cpu": cpu,
                "state": "S",
                "word": "sleeping",
                "threads": [thread],
            }
            dump = Dump(message.request, self.now, groups, [program], "")
            self._act(self.stalls.dumped(rank, dump, self.now))

    def sent(self, kind: type[LauncherMessage]) -> list[float]:
        return [
            at for at, action in self.done if isinstance(action, Send) and isinstance(action.message, kind)
        ]

    def of(self, kind: type[Action]) -> list[Action]:
        return [action for _, action in self.done if isinstance(action, kind)]

    @property
    def reports(self) -> list[float]:
        return [at for at, action in self.done if isinstance(action, ReportStall)]

    @property
    def told(self) -> list[str]:
        return [action.line for _, action in self.done if isinstance(action, Tell)]


def test_a_job_that_makes_steps_is_never_asked() -> None:
    job = Job(steps=1)
    for second in range(300):
        job.until(float(second))
        job.steps(1)
    assert not job.done


def test_a_stall_is_reported_once_after_a_minute_and_the_end_of_it_said() -> None:
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


def test_a_second_stall_is_reported_too_and_auto_learns_from_the_first() -> None:
    job = Job(steps=5)
    job.until(100)
    job.steps(1, gap=100)
    job.until(1099)
    assert len(job.reports) == 1
    job.until(1110)
    assert job.reports[1] == pytest.approx(1100, abs=DUE)


def test_auto_goes_by_the_rank_with_the_shortest_gap() -> None:
    """A rank's own gaps are at least as long as the job's."""
    job = Job()
    job.steps(1, 0, gap=30)
    job.steps(1, 1, gap=20)
    job.until(195)
    assert not job.reports
    job.until(210)
    assert job.reports == [pytest.approx(200, abs=DUE)]


def test_nothing_is_counted_before_the_first_step() -> None:
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
            "--stall-action abort: before the first step, it ends the job once rank 0 uses no CPU for 20 s",
        ),
        (
            None,
            615.0,
            "the job is left alone: --stall-action abort begins with the first step by --stall-timeout auto",
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
    (report,) = [action for _, action in job.done if isinstance(action, ReportStall)]
    assert report.begun is False
    assert report.explanation.lines[-1] == said
    assert not job.of(ActOnStall)
    assert title(report) == (
        f"no progress for {due:.0f} s, before the first step: rank 0 on node0 has not called init_process_group"
    )


def test_before_the_first_step_a_rank_that_does_nothing_is_ended_and_one_at_work_is_left_alone() -> None:
    job = Job(StallSettings(20, ABORT))
    job.waits(1)
    job.works_until = inf
    job.until(90)
    assert job.told == ["rank 0 is at work: --stall-action abort leaves the job alone"]
    assert not job.of(ActOnStall)
    job.works_until = job.now
    job.until(200)
    # It has worked in a part of the time up to the next look, and in none up to the one after it.
    (acted,) = (at for at, action in job.done if isinstance(action, ActOnStall))
    assert acted == pytest.approx(120, abs=10)
    assert len(job.reports) == 1
    assert job.stalls.stalls[0].seconds == pytest.approx(acted, abs=1)


def test_a_rank_that_goes_on_before_the_second_look_is_not_ended() -> None:
    job = Job(StallSettings(20, ABORT))
    job.waits(1)
    job.until(30)
    job.prints()
    job.until(35)
    assert job.reports
    assert not job.of(ActOnStall)
    assert job.told == ["the job continues, after 30 s without progress"]


def test_before_the_first_step_the_rank_that_is_waited_for_last_is_blamed() -> None:
    """Rank 0 was late, and was reported; then it calls a barrier, and rank 1 never comes."""
    job = Job(StallSettings(20, ABORT))
    job.waits(1)
    job.works_until = inf
    job.until(70)
    assert len(job.reports) == 1
    job.works_until = job.now
    job.waits(0)
    job.until(85)  # a look comes upon both in init_process_group
    assert len(job.reports) == 1
    job.beats[1] = job.beats[1]._replace(waits_since=None)
    job.called, job.lines = {0: ["barrier"], 1: []}, [1, 7]
    job.until(200)
    reports = [action for action in job.of(ReportStall) if isinstance(action, ReportStall)]
    assert [report.number for report in reports] == [1, 2]
    assert reports[1].explanation.headline == "rank 1 on node1 has not called barrier #0"
    assert reports[1].explanation.lines[-1].endswith("it ends the job once rank 1 uses no CPU for 20 s")
    (acted,) = [action for action in job.of(ActOnStall) if isinstance(action, ActOnStall)]
    assert (acted.stall.ranks, acted.stall.operation, acted.stall.line) == ((1,), "barrier", 7)
    assert [stall.ranks for stall in job.stalls.stalls] == [(0,), (1,)]


def test_before_the_first_step_the_line_is_that_of_the_last_look() -> None:
    job = Job(StallSettings(20, ABORT))
    job.waits(1)
    job.works_until = 50
    job.until(45)
    assert job.told == ["rank 0 is at work: --stall-action abort leaves the job alone"]
    job.lines[0] = 9
    job.until(100)
    (acted,) = [action for action in job.of(ActOnStall) if isinstance(action, ActOnStall)]
    assert acted.stall.line == 9
    shown = [action.stall.line for action in job.of(ReportStall) if isinstance(action, ReportStall)]
    assert shown == [1, 9]


def test_before_the_first_step_a_wait_that_is_over_is_a_stall_no_more() -> None:
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
    assert not job.stalls.stalled(job.now)


def test_before_the_first_step_a_group_that_all_make_is_left_alone_and_looked_at_again() -> None:
    job = Job(StallSettings(20, ABORT))
    job.waits(0)
    job.waits(1)
    job.until(100)
    (report,) = [action for action in job.of(ReportStall) if isinstance(action, ReportStall)]
    assert report.explanation.headline == "all have called init_process_group, but it does not complete"
    assert report.explanation.lines[-1] == (
        "the job is left alone: before the first step, --stall-action abort ends it only for a rank that the "
        "others wait for"
    )
    assert not job.told
    job.beats[1] = job.beats[1]._replace(waits_since=None)
    job.called, job.lines = {0: ["barrier"], 1: []}, [1, 7]
    job.until(150)
    (acted,) = [action for action in job.of(ActOnStall) if isinstance(action, ActOnStall)]
    assert (acted.stall.ranks, acted.stall.line) == ((1,), 7)


@pytest.mark.parametrize("timeout", [20, None])
def test_before_the_first_step_the_end_of_a_rank_that_was_at_work_is_looked_at(timeout: float | None) -> None:
    job = Job(StallSettings(timeout, ABORT))
    job.waits(1)
    job.works_until = inf
    job.until(650 if timeout is None else 50)
    assert not job.of(ActOnStall)
    job.ends(0)
    job.until(job.now + DUE)
    (acted,) = [action for action in job.of(ActOnStall) if isinstance(action, ActOnStall)]
    assert (
        acted.explanation.headline == "rank 0 on node0 has left (exit 0) without calling init_process_group"
    )


def test_a_rank_that_starts_late_is_waited_for() -> None:
    job = Job(StallSettings(20))
    job.waits(0)
    job.until(15)
    job.stalls.started(job.ranks[0], 15)
    job.until(60)
    assert job.reports == [pytest.approx(35, abs=DUE)]


def test_collectives_count_where_no_rank_has_an_optimizer() -> None:
    job = Job(StallSettings(3))
    job.beats = [Beat(0, 12, 0.1, 0, False, 0, 1.0)] * 2
    job.until(100)
    assert len(job.reports) == 1


def few(count: int) -> list[Beat]:
    """Of a job without an optimizer so far, which has completed some collectives."""
    return [Beat(0, count, 0.1, 0, False, 0, 1.0)] * 2


@pytest.mark.parametrize(("count", "reported"), [(1, False), (FEW + 1, True)])
def test_ranks_that_compute_after_a_first_barrier_have_yet_to_begin(count: int, reported: bool) -> None:
    """They compile, and make their optimizer only then."""
    job = Job(StallSettings(20, ABORT))
    job.slow, job.works_until = 0.3, inf
    job.beats = few(count)
    job.until(150)
    assert bool(job.reports) == bool(job.of(ActOnStall)) == reported


def test_a_job_that_began_later_counts_from_there() -> None:
    job = Job(StallSettings(20, ABORT))
    job.slow, job.works_until = 0.3, inf
    job.beats = few(1)
    job.until(100)
    job.works_until = job.now
    job.steps(1)
    job.until(150)
    assert job.reports == [pytest.approx(120, abs=DUE)]
    assert job.of(ActOnStall)


def test_a_rank_that_others_wait_for_while_it_computes_after_a_first_barrier_is_before_its_first_step() -> (
    None
):
    job = Job(StallSettings(20, ABORT))
    job.slow, job.works_until = 0.3, inf
    job.beats = few(1)
    job.beats[1] = job.beats[1]._replace(waits_since=1.0)
    job.called = {0: [], 1: ["barrier"]}
    job.until(100)
    (report,) = [action for action in job.of(ReportStall) if isinstance(action, ReportStall)]
    assert not report.begun
    assert report.explanation.headline == "rank 0 on node0 has not called barrier #0"
    assert not job.of(ActOnStall)


def test_a_short_timeout_is_kept_though_beats_are_rare() -> None:
    job = Job(StallSettings(3), steps=7)
    job.until(9)
    (at,) = job.reports
    assert 3 <= at <= 3 + DUE


def test_a_stall_that_has_begun_before_anything_was_heard_is_not_late() -> None:
    job = Job(StallSettings(3))
    job.until(1)
    job.steps(7)
    job.until(9)
    assert job.reports == [pytest.approx(4, abs=0.3)]


def test_what_one_rank_does_is_progress_of_the_job() -> None:
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


def test_progress_that_only_the_answer_tells_of_is_no_stall() -> None:
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


def test_silent_agents_do_not_keep_the_report() -> None:
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


def test_a_slow_answer_by_which_the_stall_is_known_at_all_does_not_either() -> None:
    job = Job(StallSettings(5), steps=1)
    job.slow = 1.3
    job.until(9)
    assert job.sent(AskProgress)[0] == 5
    assert job.reports == [pytest.approx(6.3 + 2 * LEAST)]


def test_a_stall_that_begins_just_after_a_beat_is_not_late() -> None:
    """Agents were asked before, and have answered a moment later."""
    job = Job(StallSettings(5))
    job.slow = 0.2
    job.until(10.5)
    job.steps(7)
    job.until(30)
    (at,) = job.reports
    assert 15.5 <= at <= 15.5 + DUE


def test_a_launcher_that_comes_late_gives_less_time_to_answers() -> None:
    job = Job(StallSettings(15), steps=1)
    job.until(14)
    job.dumping = {0}
    job.now = 16.1
    job.until(30)
    assert job.reports == [pytest.approx(15 + DUE - MIN_NATIVE)]


def test_answers_have_a_moment_though_the_launcher_comes_very_late() -> None:
    job = Job(StallSettings(15), steps=1)
    job.until(14)
    job.answering = job.dumping = {0}
    job.now = 19.0
    job.until(30)
    assert job.reports == [pytest.approx(19 + 2 * LEAST)]


def test_a_program_without_a_ledger_stalls_only_by_a_number() -> None:
    for settings, reports in ((StallSettings(None, ledgers=False), 0), (StallSettings(5, ledgers=False), 1)):
        job = Job(settings)
        job.beats = [Beat()] * 2
        job.until(300)
        assert len(job.reports) == reports


def test_the_launchers_own_sleep_is_forgiven() -> None:
    job = Job(steps=1)
    job.until(20)
    job.now += 1000
    job.stalls.forgive(1000, job.now)
    job.until(1059)
    assert not job.reports
    job.until(1100)
    assert len(job.reports) == 1


def test_auto_does_not_learn_from_a_time_in_which_the_job_was_suspended() -> None:
    job = Job(steps=5)
    job.until(20)
    job.now += 1000
    job.stalls.forgive(1000, job.now)
    job.steps(1, gap=1010)
    job.until(1200)
    assert job.reports == [pytest.approx(1020 + 10 * 10, abs=DUE)]


def test_a_straggler_that_its_cgroup_throttles_is_said_to_be() -> None:
    ranks = [Rank(n, f"node{n}", RankState.RUNNING) for n in range(2)]
    stalls = Stalls(ranks, StallSettings(0), 0.0)
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
    assert stalls.dumped(ranks[1], dump, 4.0) == [
        Tell(
            "node1 is slower than the others: 20 ms of computing per step, the others 10 ms, over 200 steps; "
            "its cgroup throttled it 47 % of the time"
        )
    ]


def test_abort_ends_all_ranks_and_names_who_is_waited_for() -> None:
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


def test_programs_that_have_finished_may_take_long_to_exit_as_long_as_they_do_anything() -> None:
    job = Job(StallSettings(20, ABORT), steps=5)
    job.works_until = inf
    job.until(10)
    job.beats = [beat._replace(leaving=True) for beat in job.beats]
    job.ends(1)
    job.until(200)
    assert not job.reports
    job.works_until = job.now
    job.until(300)
    (report,) = [action for action in job.of(ReportStall) if isinstance(action, ReportStall)]
    assert report.explanation.headline == "rank 0 on node0 has finished, but doesn't exit"
    (acted,) = [action for action in job.of(ActOnStall) if isinstance(action, ActOnStall)]
    assert acted.stall.ranks == (0,)


def test_programs_that_have_finished_after_few_collectives_are_no_beginning() -> None:
    job = Job(StallSettings(20, ABORT))
    job.slow, job.works_until = 0.3, 60
    job.beats = [beat._replace(leaving=True) for beat in few(1)]
    job.until(150)
    (report,) = [action for action in job.of(ReportStall) if isinstance(action, ReportStall)]
    assert report.explanation.headline == "all ranks have finished, but don't exit"


def test_a_rank_that_leaves_while_another_waits_is_blamed_at_once() -> None:
    job = Job(StallSettings(20, ABORT), steps=5)
    job.works_until = inf
    job.called = {0: [], 1: ["barrier"]}
    job.beats[0] = job.beats[0]._replace(leaving=True)
    job.until(30)
    (acted,) = [action for action in job.of(ActOnStall) if isinstance(action, ActOnStall)]
    assert acted.explanation.headline == "rank 0 on node0 has not called barrier #0"


@pytest.mark.parametrize(("finished", "kind", "code"), [(4, "ok", 0), (3, "stalled", 4)])
def test_a_stall_of_programs_that_have_all_finished_is_no_failure(
    finished: int, kind: str, code: int
) -> None:
    """Those that their agents end then had said that they would exit with 0."""
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


def test_of_ranks_that_wait_for_each_other_none_is_the_first_failure() -> None:
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
    assert (stall.ranks, stall.text) == ((0, 1), "ranks 0-1 on node0, node1 wait for each other in messages")
    first = outcome.first_failure
    assert first
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
