"""Collect the calls of all ranks when one fails because others call something else, or have left.  Pure.

One rank's error shows only its own call.  Before the other ranks are ended, they have a moment to report
their calls, in an error of their own or in a dump.  ``ccl`` reports differing calls.  With gloo, a rank that
gets more data than it expects is aborted, and the others only see a closed connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from signal import SIGABRT

from cpulaunch import messages
from cpulaunch.cause import Cause, Kind
from cpulaunch.messages import Dump
from cpulaunch.supervise.job.outcome import Failure
from cpulaunch.supervise.job.rank import Rank, RankState
from cpulaunch.supervise.stalls.inquiry import Inquiry
from cpulaunch.supervise.stalls.report import (
    describe_calls,
    describe_leavers,
    explain_timeout,
    former_members,
    left_headline,
)
from cpulaunch.supervise.stalls.snapshot import Snapshot
from cpulaunch.supervise.stalls.stacks import BACKWARD
from cpulaunch.supervise.stalls.waiting import waits

DISAGREE = "ranks make different calls"

WITHIN = 2.0
"""Seconds that the other ranks have to report their calls."""


def is_about_others(cause: Cause) -> bool:
    """Whether other ranks may be the reason, because they call something else or have left."""
    return cause.differ or cause.is_consequence


def aborted_by_gloo(end: messages.Exit) -> bool:
    """Whether a rank was aborted (SIGABRT) in an operation of another backend than ``ccl``, such as gloo."""
    pending = waits({0: end.groups or []}, 1)
    return end.signal == SIGABRT and any(wait.group.backend != "ccl" for wait in pending)


class Calls:
    """Collects the calls of all ranks after the error of the ``first`` rank.

    ``requests`` are the messages to send.
    """

    def __init__(self, ranks: Sequence[Rank], first: Rank, now: float, inquiry: Inquiry) -> None:
        self.first, self.due = first, now + WITHIN
        self._ranks = ranks
        others = (each.rank for each in ranks if each.state is RankState.RUNNING and not each.raised)
        self._question, self.requests = inquiry.ask(others, self.due, fresh=True)

    @property
    def dumps(self) -> Mapping[int, Dump]:
        return self._question.answers

    def is_over(self, now: float) -> bool:
        """Whether to stop waiting.

        True if all ranks have answered, failed or ended, or if the time is over.  Also true if a rank was
        killed by a signal other than SIGABRT, because this explains the error.
        """
        asked = [self._ranks[rank] for rank in self._question.ranks]
        if any(each.exit and each.exit.signal not in (None, SIGABRT) for each in asked):
            return True
        return self._question.is_over(now) or all(self._ranks[rank].raised for rank in self._question.waiting)

    def add_note(self, failure: Failure) -> Failure:
        """Return ``failure`` with a note on the ranks' calls, if other ranks may be the reason.

        If the calls differ, the note has a line for each kind of call.  Otherwise it names ranks that have
        left the group, or says what the failed rank waited for until its timeout.
        """
        cause = failure.cause
        if failure.signal != SIGABRT and not is_about_others(cause):
            return failure
        snapshots = [_snapshot(rank, self.dumps.get(rank.rank)) for rank in self._ranks]
        reported = cause.differ
        lines, those = describe_calls(snapshots, reported=reported, pair=_pair(failure))
        if reported or lines:
            note = "\n".join(lines or former_members(snapshots)) or failure.note
            known = cause if reported else cause._replace(kind=Kind.CALLS_DIFFER)
            return replace(failure, note=note, disagree=True, ranks=tuple(those), text=DISAGREE, cause=known)
        if lines := former_members(snapshots):
            return replace(failure, note="\n".join(lines))
        if failure.rank is None or cause.timeout is None or cause.operation is None:
            return failure
        if found := explain_timeout(snapshots, failure.rank):
            return replace(failure, text=found.headline, note="\n".join(found.lines), ranks=found.ranks)
        return failure


def _pair(failure: Failure) -> tuple[int, ...]:
    """Return the sender and the receiver whose sizes differ; empty if they are unknown."""
    cause = failure.cause
    finder = failure.rank if cause.finder is None else cause.finder
    if cause.kind is not Kind.SIZES_DIFFER or finder is None or cause.rank is None:
        return ()
    return finder, cause.rank


def explain_leavers(failure: Failure, ranks: Sequence[Rank], calls: Calls | None) -> Failure:
    """Explain a failure whose ``ranks`` have left: add the operation in which other ranks waited for them.

    If they had all called the operation before they left, they are not the cause; ``ranks`` of the result is
    then empty.
    """
    dumps = calls.dumps if calls else {}
    snapshots = [
        Snapshot(each.rank, each.host, left=each.status, dump=each.last_dump)
        if each.rank in failure.ranks
        else _snapshot(each, dumps.get(each.rank))
        for each in ranks
    ]
    text, lines = describe_leavers(snapshots) or (left_headline(snapshots, failure.ranks), [])
    note = "\n".join([*lines, *filter(None, [failure.note])])
    return replace(failure, text=text, note=note, ranks=failure.ranks if text else ())


def _snapshot(rank: Rank, dump: Dump | None) -> Snapshot:
    raised = rank.raised
    if raised is None:
        left = rank.status if rank.exit and rank.exit.own and rank.exit.code == 0 else ""
        return Snapshot(rank.rank, rank.host, left, dump or rank.last_dump)
    own = Dump(0, raised.at, raised.groups, [], "")
    return Snapshot(rank.rank, rank.host, dump=own, raised_at=_place(raised))


def _place(raised: messages.Failure) -> str:
    """Describe where an exception was raised: ``train.py:88 load_batch``."""
    if not raised.file:
        return ""
    name = raised.file.rpartition("/")[2]
    line = rf'{re.escape(name)}", line {raised.line}, in (\S+)'
    functions = re.findall(line, raised.traceback)
    backward = ", in the backward pass" if BACKWARD in raised.traceback else ""
    return " ".join([f"{name}:{raised.line}", *functions[-1:]]) + backward
