"""Detect that a job makes no progress, and ask its agents why.

Pure: as in the job's state machine, each event comes with its time, on the launcher's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from math import inf
from typing import Any

from cpulaunch.messages import AskProgress, Beat, Dump
from cpulaunch.model.names import RANKS, Names
from cpulaunch.supervise.job.events import Action, ActOnStall, ReportStall, Send, Tell
from cpulaunch.supervise.job.outcome import Stall, append_sides
from cpulaunch.supervise.job.rank import Rank, RankState
from cpulaunch.supervise.stalls.first_step import SecondLook, computes
from cpulaunch.supervise.stalls.inquiry import Inquiry, Question
from cpulaunch.supervise.stalls.location import THROTTLED
from cpulaunch.supervise.stalls.progress import ANSWERS, REPORT, Pauses, StallSettings
from cpulaunch.supervise.stalls.report import Explanation, explain
from cpulaunch.supervise.stalls.sentences import is_or_are
from cpulaunch.supervise.stalls.snapshot import Snapshot
from cpulaunch.supervise.stalls.stragglers import Straggler, Stragglers
from cpulaunch.wording import shown_path

LEAST = 0.8
"""Minimum seconds that agents have to answer."""

DUE = 2.9
"""Seconds between the timeout and the report of a stall.

The report does not wait longer for answers, except to give agents their ``LEAST`` seconds.
"""

MIN_NATIVE = 0.8
"""Seconds of ``DUE`` that are reserved for the frames of C and C++ of suspects."""

AGAIN, ASKED = 1.0, 16
"""During a stall, ``ASKED`` ranks are asked for progress every ``AGAIN`` seconds, as beats are rare."""

MOMENT = 0.1
"""Maximum error of the hosts' clocks, in seconds."""


class Phase(Enum):
    """The phases of detecting a stall."""

    WATCHING = auto()
    ASKING = auto()  # all ranks were asked for their progress
    LOOKING = auto()  # all ranks were asked for a dump
    LOOKING_CLOSER = auto()  # suspects were asked for a dump with frames of C and C++
    FINISHED = auto()  # all remaining programs have announced their end: check whether they use the CPU
    STALLED = auto()  # a stall was reported, and is not over


class Stalls:
    """Detects stalls from beats, output and answers to the ``inquiry``.

    Call ``look`` regularly, and at ``wake_at``.  Each method for an event returns the actions to take.
    ``who`` is the name of the job or instance in messages.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        settings: StallSettings,
        now: float,
        inquiry: Inquiry,
        names: Names = RANKS,
        who: str = "the job",
    ) -> None:
        self.settings, self._inquiry, self._names, self._who = settings, inquiry, names, who
        self._ranks = {rank.rank: rank for rank in ranks}
        self.stalls: list[Stall] = []
        self._phase = Phase.WATCHING
        self._pauses = Pauses(self._ranks, settings, now)
        self._until = inf
        self._waiting: set[int] = set()  # ranks that haven't answered AskProgress
        self._question: Question | None = None  # to all ranks
        self._closer: Question | None = None  # to suspects
        self._dumps: Mapping[int, Dump] = {}  # the last answers
        self._second: SecondLook | None = None  # after a report before the first step, or in FINISHED
        self._explained: Explanation | None = None  # of the last report
        self._suspects: Sequence[int] = ()  # the ranks that _closer asks
        self._stragglers = Stragglers([rank.host for rank in ranks])
        self._slow: list[tuple[Straggler, Question]] = []  # stragglers that are asked why they are slow

    # ---- events

    def beat(self, rank: Rank, beat: Beat, now: float) -> list[Action]:
        more = self._pauses.beat(rank, beat, now)
        if self._phase is Phase.ASKING:
            self._waiting.discard(rank.rank)
        actions: list[Action] = []
        for straggler in self._stragglers.beat(rank.rank, beat, now):
            question, sends = self._inquiry.ask([straggler.rank], inf)
            self._slow.append((straggler, question))
            actions += sends
        if more and beat.progressed_at is not None:
            actions += self._progress(min(now, beat.progressed_at + rank.clock), now)
        return actions + self.look(now)

    def add_progress(self, rank: Rank, now: float) -> list[Action]:
        """Record that a rank's program has started or printed something."""
        return self._progress(now, now)

    def handle_end(self, rank: Rank, now: float) -> list[Action]:
        """Handle the end of a rank's program.

        If a stall was reported before the first step, explain it again: the others may wait for this rank.
        """
        if self._phase is not Phase.STALLED or self._pauses.begun:
            return []
        self._watch()
        self._pauses.look_at = now
        return self.look(now)

    def handle_answer(self, rank: Rank, now: float) -> list[Action]:
        actions: list[Action] = []
        for straggler, question in self._slow:
            if dump := question.answers.get(straggler.rank):
                actions.append(Tell(f"{straggler}{_why_slow(dump)}"))
        if actions:
            self._slow = [each for each in self._slow if not each[1].answers]
        return actions + self.look(now)

    def forgive(self, asleep: float, now: float) -> None:
        """Don't count the last ``asleep`` seconds, in which the launcher or the terminal was suspended."""
        self._pauses.forgive(asleep, now)
        self._stragglers.forget()
        if self._phase is not Phase.STALLED:
            self._watch()
        elif self._second:
            self._second.again(now)
            self._until = self._second.due

    def end(self) -> None:
        """Detect no more stalls, because the ranks are being ended."""
        self.settings = self.settings._replace(timeout=0)

    def describe(self, now: float) -> str:
        """Describe the current stall; empty if there is none."""
        if self._phase is not Phase.STALLED:
            return ""
        stall, explained = self.stalls[-1], self._explained
        text = f"no progress for {now - self._pauses.since:.0f} s: {stall.text}"
        return append_sides(text, stall.note) if explained and explained.disagree else text

    # ---- timing

    @property
    def wake_at(self) -> float | None:
        """The time at which to call ``look``, unless an event comes first; None for no time."""
        if self._phase is Phase.WATCHING and not self.settings.never:
            return self._pauses.look_at
        return self._until if self._until < inf else None

    def look(self, now: float) -> list[Action]:
        if self.settings.never:
            return []
        if self._phase is Phase.WATCHING:
            return self._ask(now) if self._pauses.may_be_due(now) else []
        if self._phase is Phase.FINISHED and self._second:
            return self._look_at_finished(self._second, now)
        if self._phase is Phase.STALLED:
            return self._look_again(self._second, now) if self._second else self._ask_for_progress(now)
        if self._phase is Phase.ASKING:
            if self._waiting and now < self._until:
                return []
            return self._dump(now) if self._pauses.is_due(now) else self._watch()
        question = self._closer or self._question
        if question and not question.is_over(now):
            return []
        self._dumps = _merged(self._question, self._closer)
        return self._look_closer(now) if self._phase is Phase.LOOKING else self._report(now)

    def _running(self) -> list[int]:
        return [number for number, rank in self._ranks.items() if rank.state is RankState.RUNNING]

    def _finished(self) -> list[int]:
        """Return the running ranks if all of them have announced their end, else an empty list."""
        running = self._running()
        return running if all(map(self._pauses.leaves, running)) else []

    # ---- the phases

    def _watch(self) -> list[Action]:
        self._phase, self._until, self._waiting, self._second = Phase.WATCHING, inf, set(), None
        return []

    def _ask(self, now: float) -> list[Action]:
        self._phase = Phase.ASKING
        running = self._running()
        self._waiting, self._until = set(running), max(self._pauses.due + ANSWERS, now + LEAST)
        return [Send(rank, AskProgress()) for rank in running]

    def _dump(self, now: float) -> list[Action]:
        self._phase, self._closer = Phase.LOOKING, None
        self._until = max(self._pauses.due + DUE - MIN_NATIVE, now + LEAST)
        self._question, sends = self._inquiry.ask(self._running(), self._until)
        return [*sends]

    def _look_closer(self, now: float) -> list[Action]:
        found = explain(self._snapshots(now))
        # Without ledgers, the others may wait for any rank.
        native = {*found.ranks, *found.odd} if self.settings.ledgers else set(self._ranks)
        # If the others wait for no rank, any rank that computes may be on its way to the first step.
        asks_all = found.operation is None and self._pauses.may_yet_begin
        suspects = [rank for rank in self._running() if asks_all or rank in native]
        due = self._pauses.due + DUE
        if not suspects or found.disagree or due < now + MIN_NATIVE / 2:
            return self._report(now)
        self._phase, self._suspects, self._until = Phase.LOOKING_CLOSER, suspects, due
        self._closer, sends = self._inquiry.ask(suspects, due, native=native)
        return [*sends]

    def _report(self, now: float) -> list[Action]:
        paused = round(now - self._pauses.since, 1)
        snapshots = self._snapshots(now)
        explanation = explain(snapshots, paused, self._names)
        if self._phase is Phase.LOOKING_CLOSER and self._may_still_begin(explanation):
            self._pauses.restart_beginning()
            return self._watch()
        if not self._pauses.begun and explanation.operation is None:  # no rank waits after all
            self._pauses.look_at = now + self._pauses.timeout
            return self._watch()
        if self._phase is not Phase.FINISHED and (finished := self._finished()):
            self._phase = Phase.FINISHED
            self._second = SecondLook(finished, self._dumps, self._pauses.timeout, now)
            self._until = self._second.due
            return []
        wanted = self.settings.action != REPORT
        acts = wanted and (self._pauses.begun or explanation.certain)
        self._second, self._until = None, now + AGAIN
        if wanted and not acts:
            explanation = self._with_advice(explanation, now)
        return self._start_stall(explanation, snapshots, paused, acts=acts)

    def _may_still_begin(self, explanation: Explanation) -> bool:
        """Whether the first step may be yet to come, and a rank that the others wait for computes."""
        if explanation.certain or explanation.mutual or not self._pauses.may_yet_begin or self._finished():
            return False
        before = self._question.answers if self._question else {}
        return any(computes(before.get(rank), self._dumps.get(rank)) for rank in self._suspects)

    def _start_stall(
        self, explanation: Explanation, snapshots: Sequence[Snapshot], paused: float, *, acts: bool
    ) -> list[Action]:
        self._phase = Phase.STALLED
        self._explained, stall = explanation, self._stall(explanation, paused, self._pauses.since)
        self.stalls.append(stall)
        report = ReportStall(len(self.stalls), stall, explanation, tuple(snapshots), self._pauses.begun)
        return [report, *([ActOnStall(stall, explanation)] if acts else [])]

    def _with_advice(self, explanation: Explanation, now: float) -> Explanation:
        """Add advice to an explanation: why ``--stall-action`` doesn't act before the first step.

        The ranks that the others wait for may be busy with their start.  If ``--stall-timeout`` is a number,
        schedule a second look at them.
        """
        action, timeout = self.settings.action, self.settings.timeout
        if timeout is not None:
            self._second = SecondLook(explanation.ranks, self._dumps, timeout, now)
            self._until = self._second.due
        if self._second and explanation.ranks:
            line = self._second.promise(action)
        elif self._second:
            line = (
                f"{self._who} goes on: before the first step, --stall-action {action} ends it only if the "
                "others wait for a rank that uses no CPU"
            )
        else:
            line = (
                f"{self._who} goes on: with --stall-timeout auto, --stall-action {action} ends it only after "
                "the first step"
            )
        return replace(explanation, advice=line)

    def _look_again(self, second: SecondLook, now: float) -> list[Action]:
        """Check again which ranks the others wait for in a stall before the first step, and if they work."""
        if not second.question:
            return self._ask_again(second, now)
        all_answered = second.is_answered_by(self._running())
        if now < self._until and not all_answered:
            return []
        before, paused = self._explained, round(now - self._pauses.since, 1)
        assert before
        found, snapshots = before, []
        if all_answered:
            self._dumps = second.answers
            snapshots = self._snapshots(now)
            found = explain(snapshots, paused, self._names)
            # An operation that all ranks have called may complete at any moment, so wait for the next look.
            passing = found.operation and not (found.ranks or found.certain)
            if not _is_part(found, before) and (not passing or second.found == found.headline):
                return self._report_again(found, now)
            second.found, second.ranks = found.headline, found.ranks
        if second.are_idle():
            self._second, self._until = None, inf
            self.stalls[-1] = replace(self.stalls[-1], seconds=paused)
            if (found.headline, found.place) != (before.headline, before.place):
                return self._start_stall(found, snapshots, paused, acts=True)
            return [ActOnStall(self.stalls[-1], before)]
        second.again(now)
        self._until = second.due
        if second.reported or not second.ranks:
            return []
        second.reported = True
        goes_on = f"--stall-action {self.settings.action} doesn't end {self._who}; Ctrl-C does"
        return [Tell(f"{RANKS.several(second.ranks)} {is_or_are(second.ranks)} at work: {goes_on}")]

    def _look_at_finished(self, second: SecondLook, now: float) -> list[Action]:
        """Check whether programs that have announced their end hang, that is, use no CPU.

        Before a program exits, its exit handlers, threads and child processes may still be at work.
        """
        if not second.question:
            return self._ask_again(second, now)
        if now < self._until and not second.is_answered_by(self._running()):
            return []
        second.ranks = self._running()
        if second.are_idle():
            self._dumps = second.answers
            return self._report(now)
        second.again(now)
        self._until = second.due
        return []

    def _ask_again(self, second: SecondLook, now: float) -> list[Action]:
        if now < second.due:
            return []
        self._until = now + DUE
        second.question, sends = self._inquiry.ask(self._running(), self._until)
        # Answers delay an agent's next beat, so ask for progress, too.
        return [*(Send(send.rank, AskProgress()) for send in sends), *sends]

    def _ask_for_progress(self, now: float) -> list[Action]:
        """Ask some ranks for progress.  Ranks wait for each other, so progress of one rank is enough."""
        if now < self._until:
            return []
        self._until = now + AGAIN
        return [Send(rank, AskProgress()) for rank in self._running()[:ASKED]]

    def _report_again(self, found: Explanation, now: float) -> list[Action]:
        """Report again, because the others now wait for other ranks, or for none."""
        lasted = round(now - self._pauses.since, 1)
        self.stalls[-1] = replace(self.stalls[-1], seconds=lasted)
        actions = self._report(now)
        if found.operation is None:
            actions.append(Tell(f"{self._who} continues, after {lasted:.0f} s without progress"))
        return actions

    def _progress(self, at: float, now: float) -> list[Action]:
        stalled_since, waited_since = self._pauses.progressed_at, self._pauses.since
        self._pauses.progress(at)
        if self._phase is Phase.WATCHING or at <= stalled_since + MOMENT:
            return []
        if self._phase is not Phase.STALLED:
            return self._watch() if not self._pauses.is_due(now) else []
        lasted = at - waited_since
        self.stalls[-1] = replace(self.stalls[-1], seconds=round(lasted, 1))
        self._watch()
        return [Tell(f"{self._who} continues, after {lasted:.0f} s without progress")]

    # ---- the result

    def _snapshots(self, now: float) -> list[Snapshot]:
        return [
            Snapshot(
                rank.rank,
                rank.host,
                rank.status if rank.state.final else "",
                rank.last_dump or self._dumps.get(rank.rank),
                now=now - rank.clock,
                leaving=self._pauses.leaves(rank.rank),
                collectives=rank.beat.collectives if rank.beat else 0,
            )
            for rank in self._ranks.values()
        ]

    def _stall(self, explanation: Explanation, seconds: float, since: float) -> Stall:
        """Make the record of a stall; ``since`` is its start, on the launcher's clock."""
        first = explanation.ranks[0] if explanation.ranks else None
        place = explanation.place if explanation.place and explanation.place.has_line else None
        return Stall(
            seconds=seconds,
            ranks=explanation.ranks,
            host=None if first is None else self._ranks[first].host,
            operation=explanation.operation,
            sequence=explanation.sequence,
            file=place and shown_path(place.file),
            line=place and place.line,
            text=explanation.headline,
            note="\n".join(explanation.lines),
            advice=explanation.advice,
            at=since,
        )


def _merged(first: Question | None, closer: Question | None) -> Mapping[int, Dump]:
    """Return the ranks' answers.  Answers to ``closer`` that have stacks replace those to ``first``."""
    dumps = dict(first.answers) if first else {}
    return dumps | {rank: dump for rank, dump in (closer.answers if closer else {}).items() if dump.processes}


def _is_part(found: Explanation, before: Explanation) -> bool:
    """Whether ranks wait in the same operation as before, and for no other ranks than before."""
    same = (found.operation, found.sequence) == (before.operation, before.sequence)
    named = set(found.ranks) <= set(before.ranks) and bool(found.ranks) == bool(before.ranks)
    return same and named and not found.certain


def _why_slow(dump: Dump) -> str:
    program: dict[str, Any] = dump.processes[0] if dump.processes else {}
    quota = program.get("throttled")
    if quota and quota["share"] >= THROTTLED:
        return f"; its cgroup throttled it {100 * quota['share']:.0f} % of the time"
    return ""
