"""Sentences of a stall's report: the calls of ranks, their places, and their last operations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from cpulaunch.model.cores import CoreSet
from cpulaunch.model.hosts import fold_hosts
from cpulaunch.model.names import RANKS, Names
from cpulaunch.supervise.stalls import location
from cpulaunch.supervise.stalls.snapshot import Snapshot
from cpulaunch.supervise.stalls.waiting import Wait
from cpulaunch.wording import counted, shortened

MAX_SITUATIONS = 4
"""Maximum number of ranks that are described one by one."""

MAX_SIDES = 8
"""Maximum lines on differing calls."""

MAX_CHILDREN = 4
"""Maximum number of children of a rank that are described."""


class Words:
    """Describes ``snapshots``, all ranks of a job that made no progress for ``paused`` seconds."""

    def __init__(self, snapshots: Sequence[Snapshot], paused: float = 0.0, names: Names = RANKS) -> None:
        self.snapshots: Mapping[int, Snapshot] = {each.rank: each for each in snapshots}
        self._paused, self._names = paused, names
        self._headline_reason = ""  # what keeps ranks from running, according to the headline

    def calls(self, wait: Wait) -> list[str]:
        """Describe the calls with the same sequence number, and their places, one line for equal calls."""
        found: dict[str, list[int]] = {}
        for ranks in wait.kinds():
            for rank in ranks:
                found.setdefault(f"{what(wait, rank)}{self._at_in(wait, [rank])}", []).append(rank)
        shown = sorted(found.items(), key=lambda side: -len(side[1]))
        lines = [f"{self.named(ranks)}: {words}" for words, ranks in shown[:MAX_SIDES]]
        return lines + [f"… {len(shown) - MAX_SIDES} more"] * (len(shown) > MAX_SIDES)

    def call(self, wait: Wait, ranks: Sequence[int]) -> str:
        """Describe the call of ``ranks``, which is the same for all of them, and their places."""
        return f"{self.named(ranks)}: {what(wait, ranks[0])}{self._at_in(wait, ranks)}"

    def hold_headline(self, ranks: Sequence[int]) -> str:
        """Return a headline: what keeps the first of ``ranks`` from running.  Later lines omit the reason."""
        self._headline_reason = self.snapshots[ranks[0]].hold_reason
        equal = [rank for rank in ranks if self.snapshots[rank].hold_reason == self._headline_reason]
        return f"{self.named(equal)}: {self._headline_reason}"

    def named(self, ranks: Iterable[int]) -> str:
        """Name ranks with their hosts: ``"rank 3 on node1"``, ``"ranks 4-7 on node1"``."""
        ranks = sorted(ranks)
        hosts = list(dict.fromkeys(self.snapshots[rank].host for rank in ranks))
        return f"{self._names.several(ranks)} on {fold_hosts(hosts)}"

    def at(self, wait: Wait, ranks: Iterable[int]) -> str:
        """Return the places of ``ranks``, which have called the operation: ``", at train.py:91 main"``."""
        callers = {rank: wait.operations[rank].thread for rank in ranks}
        places = dict.fromkeys(at for rank in callers if (at := self.snapshots[rank].line_of(callers[rank])))
        return f", at {shortened(list(places))}" if places else ""

    def _at_in(self, wait: Wait, ranks: Iterable[int]) -> str:
        """Return where ``ranks`` wait in the operation, or where they are now.

        They are elsewhere if the operation is complete for all of them, or if they have called a later one.
        Other backends than ``ccl`` may record a failed operation as complete.  So with these, a rank that has
        failed counts as still waiting.
        """
        knows = wait.group.backend == "ccl"
        raised = [] if knows else [rank for rank in ranks if self.snapshots[rank].raised_at]
        there = [rank for rank in ranks if rank in wait.waiting or rank in raised]
        if there and (wait.message or any(wait.members[rank].reached <= wait.sequence for rank in there)):
            return self.at(wait, there)
        when = "called earlier" if there else "which is complete there"
        return f", {when}" + self.at(wait, there or ranks).replace(", at ", "; now at ", 1)

    def waiters(self, wait: Wait, missing: Sequence[int]) -> list[str]:
        others = [rank for rank in self.snapshots if rank not in missing]
        if self.waiting(wait) != others or not missing or len(others) == 1:
            return self.describe_waiters(wait, wait.waiting)
        return [f"all others wait in {what(wait, others[0])}{self.at(wait, others)}"]

    def waiting(self, wait: Wait) -> list[int]:
        """Return the ranks that may wait in the operation, leaving out ranks that have only started it."""
        return [rank for rank in wait.waiting if self.snapshots[rank].may_wait(wait.operations[rank].thread)]

    def describe_waiters(self, wait: Wait, ranks: Sequence[int]) -> list[str]:
        """Say which of ``ranks`` wait in the operation or have only started it, and where they are."""
        lines, waiting = [], self.waiting(wait)
        if those := [rank for rank in ranks if rank in waiting]:
            who = f"{self.named(those)} {waits_or_wait(those)}"
            lines.append(f"{who} in {what(wait, those[0])}{self.at(wait, those)}")
        if those := [rank for rank in ranks if rank not in waiting]:
            at = self.at(wait, those).replace(", at ", f", and {is_or_are(those)} at ", 1)
            lines.append(f"{self.named(those)} {has_or_have(those)} started {what(wait, those[0])}{at}")
        return lines

    def situations(self, ranks: Sequence[int], wait: Wait | None = None) -> Iterator[str]:
        for rank in ranks[:MAX_SITUATIONS]:
            yield from self._situation(self.snapshots[rank], wait)
        if len(ranks) > MAX_SITUATIONS:
            yield f"and {counted(len(ranks) - MAX_SITUATIONS, f'more {self._names.noun}')}"

    def _situation(self, snapshot: Snapshot, wait: Wait | None) -> Iterator[str]:
        """Describe a rank's last operation and its place."""
        parts = [last] if (last := self._last(snapshot, wait)) else []
        name = self.named([snapshot.rank])
        if snapshot.left:
            yield f"{name} has left: {snapshot.left}"
            return
        if snapshot.place:
            feeds = snapshot.program and location.waits_for_input(snapshot.program)
            parts.append(f"{'waits for input' if feeds else 'is'} at {snapshot.at}")
        elif snapshot.at:
            parts.append(f"is {snapshot.at} (no stack: {_why_unseen(snapshot)})")
        else:
            parts.append(f"can't be seen: {_why_unseen(snapshot)}")
        yield f"{name} {' and '.join(parts)}"
        if snapshot.hold_reason and snapshot.hold_reason != self._headline_reason:
            yield f"  {snapshot.hold_reason}"
        if not snapshot.dump or not snapshot.program:
            return
        for line in location.describe_lock_waits(snapshot.program):
            yield f"  {line}"
        for pid, text in islice(location.describe_children(snapshot.dump.processes), MAX_CHILDREN):
            yield f"  its process {pid}: {text}"

    def _last(self, snapshot: Snapshot, wait: Wait | None) -> str:
        if wait is None or wait.message or wait.meets or snapshot.dump is None or snapshot.left:
            return ""
        member = wait.members.get(snapshot.rank)
        if member is None:
            # The ledger of a program that can't run is not up to date, so the rank may be in the group.
            was_there = wait.sequence > 0 and not snapshot.hold_reason
            name = f"group {wait.group.name}"
            return f"has left {name}" if was_there else f"has called nothing in {name}, as far as known,"
        done, called = member.completed, member.record(member.reached)
        if called and (done is None or called.sequence > done.sequence):
            return f"called #{called.sequence} {self._ago(snapshot, called.enqueued)}"
        if done is None:
            return f"has completed nothing in group {wait.group.name} yet"
        return f"finished #{done.sequence} {self._ago(snapshot, done.completed)}"

    def _ago(self, snapshot: Snapshot, at: float) -> str:
        assert snapshot.dump
        ago = (snapshot.dump.at if snapshot.now is None else snapshot.now) - at
        return f"{self._paused if abs(ago - self._paused) < 1 else ago:.0f} s ago"


def what(wait: Wait, rank: int, *, short: bool = False) -> str:
    """Describe a rank's operation: ``all_reduce #4711 of group 0, 25 MB float32``."""
    op = wait.operations[rank]
    if wait.meets:
        members = CoreSet(wait.ranks.values()) if wait.group.members and not short else ()
        return op.kind + (f" of ranks {members}" if members else "")
    by = f" ({op.reduction})" if wait.reductions_differ and op.reduction else ""
    name = f"{op.kind}{by} #{op.sequence}"
    if op.peer >= 0:
        peer = wait.ranks.get(op.peer)
        whom = f"number {op.peer} of the group" if peer is None else f"rank {peer}"
        name += f" {'to' if 'send' in op.kind else 'from'} {whom}"
    if short:
        return name
    if wait.roots_differ and op.root >= 0:
        way = "to" if op.kind in ("reduce", "gather") else "from"
        name += f" {way} rank {wait.ranks.get(op.root, op.root)}"
    others = {each.bytes for each in wait.operations.values()} - {op.bytes}
    size = f", {_size(op.bytes, others)} {op.type}" if op.bytes or (others and op.type) else ""
    return f"{name} of group {wait.group.name}{size}"


def _size(count: int, others: Collection[int] = ()) -> str:
    """Format a number of bytes briefly, or exactly if one of ``others`` would read the same."""
    if any(_size(each) == _size(count) for each in others):
        return f"{count:,} bytes"
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.{1 if count < 10 * unit else 0}f}".removesuffix(".0") + f" {name}"
    return counted(count, "byte")


def _why_unseen(snapshot: Snapshot) -> str:
    if snapshot.dump is None:
        return "its agent has not answered"
    program = snapshot.program or {}
    if program.get("stacks"):
        return "its main thread runs no Python"
    return program.get("lacking") or snapshot.dump.error or "it has no stack"


def has_or_have(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def is_or_are(ranks: Collection[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def waits_or_wait(ranks: Collection[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
