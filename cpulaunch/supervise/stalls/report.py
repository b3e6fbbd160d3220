"""Explain why a job makes no progress, from what all ranks were doing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from cpulaunch.model.cores import CoreSet
from cpulaunch.model.names import INSTANCE, RANKS, Names
from cpulaunch.supervise.stalls import location
from cpulaunch.supervise.stalls.sentences import MAX_SITUATIONS, Words, has_or_have, waits_or_wait, what
from cpulaunch.supervise.stalls.snapshot import Snapshot
from cpulaunch.supervise.stalls.stacks import Frame, surviving_thread
from cpulaunch.supervise.stalls.waiting import Wait, disagreements, waits
from cpulaunch.wording import counted, shortened

_NO_LEDGER = "no ledger: the program isn't run as Python, or has no process group"


@dataclass(frozen=True)
class Explanation:
    """The explanation of a stall.

    ``headline`` is a clause.  ``ranks`` are the ranks that the others wait for, if any, and ``place`` is the
    line of the first of them.  ``disagree``: ranks have called different operations.  ``certain``: the job
    can't go on, however long one waits.  ``mutual``: ``ranks`` wait for each other, so none of them is to
    blame more than the others.  If the others wait for no rank, ``odd`` are the ranks at the least frequent
    place, whose frames of C may tell more.  ``advice`` says what will happen, or what to do.
    """

    headline: str
    lines: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    operation: str | None = None
    sequence: int | None = None
    place: Frame | None = None
    disagree: bool = False
    certain: bool = False
    mutual: bool = False
    odd: tuple[int, ...] = ()
    advice: str = ""


def explain(snapshots: Sequence[Snapshot], paused: float = 0.0, names: Names = RANKS) -> Explanation:
    """Return the first explanation that applies.

    ``snapshots`` has all ranks of the job, in order.  ``paused`` is the time without progress in seconds; the
    report also shows it as the time since a rank's last operation if they differ by less than a second.
    """
    return _Case(snapshots, _waits(snapshots), paused, names).explain()


def describe_calls(
    snapshots: Sequence[Snapshot], *, reported: bool, pair: Collection[int] = ()
) -> tuple[list[str], list[int]]:
    """Describe differing calls of ranks: what they have called, and where.

    Returns a line for each kind of call, the most frequent first, and the ranks that made the calls.  There
    is only one line if the calls differ in a value that the ledger lacks.

    Ranks that have failed in an operation count as waiting in it.  ``reported``: the process group reports
    that the calls differ.  ``pair``: the two ranks whose calls differ, if it reports them.
    """
    found = _waits(snapshots, failed=True)
    if pair:
        found = [wait.between(pair) for wait in found if set(pair) & wait.operations.keys()]
    # A rank that doesn't wait for the others may have gone on to later operations.
    earlier = disagreements(_groups(snapshots), len(snapshots)) if reported else []
    differing = earlier or [wait for wait in found if len(wait.kinds()) > 1]
    candidates = differing or (found if reported else [])
    words = Words(snapshots)
    called = [(words.calls(wait), sorted(wait.operations)) for wait in candidates if len(wait.operations) > 1]
    if reported:
        return max(called, key=lambda each: len(each[0]), default=([], []))
    return next((each for each in called if len(each[0]) > 1), ([], []))


def former_members(snapshots: Sequence[Snapshot]) -> list[str]:
    """Return a line on a rank that failed in an operation, and lines on running ranks that left its group.

    Returns no lines if no running rank has left the group.
    """
    found = _waits(snapshots, failed=True)
    case = _Case(snapshots, found)
    for wait in found:
        numbers = (wait.ranks[number] for number in wait.unknown if number in wait.ranks)
        if gone := [rank for rank in numbers if case.snapshots[rank].program]:
            return [case.words.call(wait, wait.waiting[:1]), *case.words.situations(gone, wait)]
    return []


def explain_timeout(snapshots: Sequence[Snapshot], rank: int) -> Explanation | None:
    """Explain why the operation in which ``rank`` failed did not complete; None if that is unknown."""
    return _Case(snapshots, _waits(snapshots, failed=True), waiter=rank).of_waits()


def describe_leavers(snapshots: Sequence[Snapshot]) -> tuple[str, list[str]] | None:
    """Say which ranks left without calling the operation in which others failed.

    Returns a headline, and lines on the failed ranks; None if that is unknown.  The headline is empty if no
    rank left without calling the operation; the lines then say which other ranks haven't called it.
    """
    found = _waits(snapshots, failed=True)
    case = _Case(snapshots, found)
    for wait in found:
        if left := case.left(wait, wait.absent):
            return left_headline(snapshots, left, wait), [case.words.call(wait, wait.waiting)]
    have_left = {each.rank for each in snapshots if each.left}
    if not any(_have_called(wait, have_left) for wait in found):
        return None
    late = case.of_waits()
    return "", list(late.lines) if late else []


def _have_called(wait: Wait, ranks: Collection[int]) -> bool:
    """Whether all ``ranks`` that are members of the group are known to have called the operation."""
    if any(number not in wait.ranks for number in wait.unknown):
        return False
    return set(ranks) & set(wait.ranks.values()) <= wait.members.keys()


def left_headline(snapshots: Sequence[Snapshot], ranks: Collection[int], wait: Wait | None = None) -> str:
    """Return the headline for ``ranks`` that have left while others ``wait`` for them."""
    how = dict.fromkeys(each.left for each in snapshots if each.rank in ranks)
    who = Words(snapshots).named(ranks)
    without = ""
    if wait:
        without = f" without {'answering' if wait.message else 'calling'} {_of_others(wait)}"
    return f"{who} {has_or_have(ranks)} left ({shortened(list(how))}){without}"


def _of_others(wait: Wait) -> str:
    """Name an operation: ``all_reduce #3``; for a message, ``rank 1's recv #0 from rank 0``."""
    name = what(wait, wait.waiting[0], short=True)
    return f"rank {wait.waiting[0]}'s {name}" if wait.message else name


def _waits(snapshots: Sequence[Snapshot], *, failed: bool = False) -> Sequence[Wait]:
    return waits(_groups(snapshots), len(snapshots), failed=failed)


def _groups(snapshots: Sequence[Snapshot]) -> dict[int, list[dict[str, Any]]]:
    return {each.rank: each.dump.groups for each in snapshots if each.dump}


class _Case:
    def __init__(
        self,
        snapshots: Sequence[Snapshot],
        found: Sequence[Wait],
        paused: float = 0.0,
        names: Names = RANKS,
        waiter: int | None = None,
    ) -> None:
        """``waiter``: consider only missing ranks that this rank waits for."""
        self.words, self.names = Words(snapshots, paused, names), names
        self.snapshots = self.words.snapshots
        self._waiter = waiter
        # A rank that computes may have asked for a message, but doesn't wait for it.
        self.waits = [wait for wait in found if not (wait.message and self.snapshots[wait.waiting[0]].runs)]

    def explain(self) -> Explanation:
        found = self.of_waits() or self._nobody()
        if found.place:
            return found
        if found.ranks:
            return replace(found, place=self.snapshots[found.ranks[0]].place)
        places = {each.place for each in self.snapshots.values() if not each.left}
        return replace(found, place=places.pop() if len(places) == 1 else None)

    # ---- the causes

    def of_waits(self) -> Explanation | None:
        """Explain why the operation that ranks wait in doesn't complete; None if no rank waits."""
        return (
            self._disagreement()
            or self._missing()
            or self._unmet()
            or self._crossed()
            or self._silent()
            or self._incomplete()
        )

    def _disagreement(self) -> Explanation | None:
        """Ranks have called different operations, types or sizes with the same sequence number."""
        for wait in self.waits:
            if len(kinds := wait.kinds()) > 1:
                lines = [self.words.call(wait, theirs) for theirs in kinds]
                headline = f"ranks make different calls as #{wait.sequence} of group {wait.group.name}"
                ranks = sorted(wait.operations)
                return self._explanation(
                    wait, headline, lines, ranks, disagree=True, certain=True, mutual=True
                )
        return None

    def _missing(self) -> Explanation | None:
        """Some ranks have not called an operation that others wait in, and don't wait in another one."""
        waiting = {rank for wait in self.waits for rank in self.words.waiting(wait)}
        candidates = []
        for wait in self.waits:
            is_about = self._waiter is None or self._waiter in wait.waiting
            if is_about and (free := sorted(wait.absent - waiting)):
                candidates.append((wait, free))
        if not candidates:
            return None
        wait, free = max(
            candidates, key=lambda each: (len(self.words.waiting(each[0])), len(each[0].waiting))
        )
        left = self.left(wait, free)
        free = [rank for rank in free if rank in left or not self.snapshots[rank].left]
        held = [rank for rank in free if self.snapshots[rank].hold_reason]
        first = left or held or free
        headline = self._of_absent(wait, free, left, held)
        others = [rank for rank in free if rank not in first]
        lines = [*self.words.waiters(wait, free), *self.words.situations([*first, *others], wait)]
        certain = bool(left) or bool(not held and self._locked(free))
        return self._explanation(wait, headline, lines, first, certain=certain)

    def left(self, wait: Wait, ranks: Collection[int]) -> list[int]:
        """Return the ranks that have left and may be the cause.

        If running ranks have not called the operation, a rank that may have called it before it left is no
        likely cause.
        """
        left = sorted(rank for rank in ranks if self.snapshots[rank].left)
        is_known = any(rank in wait.missing and rank not in left for rank in ranks)
        return [rank for rank in left if rank in wait.missing] if is_known else left

    def _of_absent(self, wait: Wait, free: list[int], left: list[int], held: list[int]) -> str:
        """Return the headline about the missing ranks ``free``; some may have ``left`` or be ``held``."""
        name = what(wait, wait.waiting[0], short=True)
        if left:
            return left_headline(list(self.snapshots.values()), left, wait)
        if all(self.snapshots[rank].dump is None for rank in free):
            return f"{self.words.named(free)} can't be seen; {self._others_wait(wait, free)} in {name}"
        if wait.message:
            return f"{self.words.named(free)} {has_or_have(free)} not answered {_of_others(wait)}"
        if held:
            return self.words.hold_headline(held)
        if locked := self._locked(free):
            return f"threads of {self.words.named(locked)} wait for each other's locks"
        if len(free) > len(wait.waiting):
            does = f"{waits_or_wait(wait.waiting)} in"
            if not self.words.waiting(wait):
                does = f"{has_or_have(wait.waiting)} started"
            who = f"{self.words.named(wait.waiting)} {does}"
            return f"{who} {name}, which {counted(len(free), 'rank')} {has_or_have(free)} not called"
        return f"{self.words.named(free)} {has_or_have(free)} not called {name}"

    def _others_wait(self, wait: Wait, unseen: Collection[int]) -> str:
        if {*wait.waiting, *unseen} >= self.snapshots.keys():
            return "the others wait"
        return f"{self.words.named(wait.waiting)} {waits_or_wait(wait.waiting)}"

    def _unmet(self) -> Explanation | None:
        """Ranks create a group, but other members of the group wait in another operation."""
        for wait in filter(lambda wait: wait.meets, self.waits):
            elsewhere = [other for other in self.waits if wait.absent & set(other.waiting)]
            if not elsewhere:
                continue
            those = {id(each): sorted(wait.absent & set(each.waiting)) for each in elsewhere}
            most = max(elsewhere, key=lambda each: len(those[id(each)]))
            name, other = (what(each, each.waiting[0], short=True) for each in (wait, most))
            who = f"{self.words.named(wait.waiting)} {waits_or_wait(wait.waiting)} in {name}"
            headline = f"{who}, {self.words.named(those[id(most)])} in {other}"
            lines = [
                *self.words.waiters(wait, ()),
                *(line for each in elsewhere for line in self.words.describe_waiters(each, those[id(each)])),
            ]
            ranks = sorted({*wait.waiting, *wait.absent})
            certain = not any(self.snapshots[rank].runs for rank in wait.absent)
            return self._explanation(wait, headline, lines, ranks, certain=certain, mutual=True)
        return None

    def _crossed(self) -> Explanation | None:
        """Ranks wait for each other in a circle, in different groups or for messages."""
        circle = self._circle()
        if not circle:
            return None
        lines = []
        for rank, (wait, other) in circle.items():
            who, at = self.words.named([rank]), self.words.at(wait, [rank])
            lines.append(f"{who} waits for rank {other} in {what(wait, rank)}{at}")
        wait = next(iter(circle.values()))[0]
        if all(wait.message for wait, _ in circle.values()):
            what_for = "messages"
        elif len({wait.group.name for wait, _ in circle.values()}) == 1:
            what_for = "a collective and a message"
        else:
            what_for = "different groups"
        headline = f"{self.words.named(list(circle))} wait for each other in {what_for}"
        return self._explanation(wait, headline, lines, sorted(circle), certain=True, mutual=True)

    def _circle(self) -> dict[int, tuple[Wait, int]]:
        """Find ranks that wait for each other in a circle: rank → (its wait, the rank that it waits for)."""
        edges: dict[int, tuple[Wait, int]] = {}
        for wait in self.waits:
            for rank in self.words.waiting(wait) if wait.absent else ():
                edges.setdefault(rank, (wait, min(wait.absent)))
        visited: set[int] = set()
        for start in sorted(edges):
            path: dict[int, tuple[Wait, int]] = {}
            rank = start
            while rank in edges and rank not in path and rank not in visited:
                path[rank] = edges[rank]
                rank = edges[rank][1]
            visited |= path.keys()
            if rank in path:
                ranks = list(path)
                return {each: path[each] for each in ranks[ranks.index(rank) :]}
        return {}

    def _silent(self) -> Explanation | None:
        """The launcher doesn't know which ranks the missing members of a group are."""
        for wait in self.waits:
            if wait.unknown and not any(n in wait.ranks for n in wait.unknown):
                members = f"member{'s' if len(wait.unknown) > 1 else ''} {CoreSet(wait.unknown)}"
                name = what(wait, wait.waiting[0], short=True)
                group = f"the group of {wait.group.size}" if wait.meets else f"group {wait.group.name}"
                headline = f"{members} of {group} can't be seen; {self._others_wait(wait, ())} in {name}"
                if wait.meets and wait.group.size > len(self.snapshots):
                    ours = counted(len(self.snapshots), self.names.noun)
                    headline = f"{name} expects {wait.group.size} ranks, but this job has {ours}"
                return self._explanation(wait, headline, self.words.waiters(wait, ()), ())
        return None

    def _incomplete(self) -> Explanation | None:
        """All ranks have called an operation, but it doesn't complete."""
        wait = next((w for w in self.waits if not w.absent), None)
        if wait is None:
            return None
        name = what(wait, wait.waiting[0], short=True)
        if wait.message and wait.operation.peer < 0:
            senders = [rank for rank in wait.members if rank not in wait.waiting]
            lines = [*self.words.waiters(wait, senders), *self.words.situations(senders, wait)]
            return self._explanation(
                wait, f"no rank has sent what {self.words.named(wait.waiting)} waits for in {name}", lines, ()
            )
        lines = [f"all have called {what(wait, wait.waiting[0])}{self.words.at(wait, wait.waiting)}"]
        if held := [rank for rank in wait.members if self.snapshots[rank].hold_reason]:
            headline = self.words.hold_headline(held)
            return self._explanation(wait, headline, [*lines, *self.words.situations(held, wait)], held)
        pairs = wait.pairs()
        if wait.message:
            peer = wait.ranks.get(wait.operation.peer)
            pairs = [] if peer is None else [(wait.waiting[0], peer)]
        if not pairs:
            return self._explanation(wait, f"all have called {name}, but it has not completed", lines, ())
        by_hosts: dict[frozenset[str], list[tuple[int, int]]] = {}
        for a, b in pairs:
            pair_hosts = frozenset((self.snapshots[a].host, self.snapshots[b].host))
            by_hosts.setdefault(pair_hosts, []).append((a, b))
        ends = [self.words.named([rank]) for rank in pairs[0]]
        if len(by_hosts) == 1 and len(hosts := next(iter(by_hosts))) == 2:
            ends = sorted(hosts)
        headline = f"{name} does not complete between {ends[0]} and {ends[1]}"
        for those in islice(by_hosts.values(), MAX_SITUATIONS):
            waiting, others = {a for a, _ in those}, {b for _, b in those}
            who, whom = self.words.named(waiting), self.words.named(others)
            lines.append(f"{who} {waits_or_wait(waiting)} for {whom}")
        return self._explanation(wait, headline, lines, sorted({*chain.from_iterable(pairs)}), mutual=True)

    def _nobody(self) -> Explanation:
        """No rank waits in an operation."""
        noun = self.names.noun
        running = [each.rank for each in self.snapshots.values() if not each.left]
        programs = {rank: program for rank in running if (program := self.snapshots[rank].program)}
        if held := [rank for rank in running if self.snapshots[rank].hold_reason]:
            return self._about(self.words.hold_headline(held), held)
        if locked := self._locked(running):
            return self._about(f"threads of {self.words.named(locked)} wait for each other's locks", locked)
        if running and all(self.snapshots[rank].leaving for rank in running):
            everybody = len(running) == len(self.snapshots) > 1
            who = f"all {noun}s" if everybody else self.words.named(running)
            words = "has finished, but doesn't" if len(running) == 1 else "have finished, but don't"
            threads = [surviving_thread(programs[rank]) if rank in programs else None for rank in running]
            why = ": threads have not ended" if all(threads) else ""
            return self._about(f"{who} {words} exit{why}", running, everybody=everybody)
        if waiting := [rank for rank in programs if location.waits_for_input(programs[rank])]:
            everybody = waiting == running and len(running) > 1
            who = f"{self.words.named(waiting)} {waits_or_wait(waiting)}"
            return self._about(
                f"{f'all {noun}s wait' if everybody else who} for input", waiting, everybody=everybody
            )
        return self._somewhere(running)

    def _about(self, headline: str, ranks: Sequence[int], *, everybody: bool = False) -> Explanation:
        """Explain a stall by ``ranks``.  ``everybody``: no rank is to blame more than the others."""
        lines = tuple(self.words.situations(ranks))
        return Explanation(headline, lines, () if everybody else tuple(ranks))

    def _somewhere(self, running: Sequence[int]) -> Explanation:
        noun = self.names.noun
        places: dict[str, list[int]] = {}
        for rank in running:
            places.setdefault(self.snapshots[rank].at, []).append(rank)
        fewest = min(places.values(), key=len, default=[]) if len(places) > 1 else []
        has_ledger = any(each.dump and each.dump.groups for each in self.snapshots.values())
        ranks = tuple(running) if len(running) == 1 else ()
        if len(places) == 1 and (at := next(iter(places))):
            who = f"all {noun}s are" if len(running) > 1 else f"{self.words.named(running)} is"
            first = self.snapshots[running[0]]
            headline = f"{who} {'at ' if first.place else ''}{at}"
        elif has_ledger:
            headline = f"no {noun} waits in a collective"
        else:
            who = f"the {noun}s wait" if len(running) > 1 else f"{self.words.named(running)} waits"
            headline = f"it is unknown what {who} for"
        lines = []
        if not has_ledger and noun != INSTANCE:
            done = max(each.collectives for each in self.snapshots.values())
            ended = f"all ranks have destroyed their process groups, after {counted(done, 'collective')}"
            lines.append(ended if done else _NO_LEDGER)
        lines += [line for theirs in places.values() for line in self.words.situations(theirs[:1])]
        lines += self.words.situations([each.rank for each in self.snapshots.values() if each.left])
        return Explanation(headline, tuple(lines), ranks, odd=tuple(fewest) if has_ledger else ())

    def _locked(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose threads wait for each other's locks."""
        programs = ((rank, self.snapshots[rank].program) for rank in ranks)
        return [rank for rank, program in programs if program and location.is_deadlocked(program)]

    def _explanation(
        self, wait: Wait, headline: str, lines: Iterable[str], ranks: Iterable[int], **flags: Any
    ) -> Explanation:
        first = next(iter(ranks := tuple(ranks)), -1)
        operation = wait.operations.get(first)
        program = self.snapshots[first].program if operation else None
        place = location.place(program, operation.thread) if operation and program else None
        return Explanation(headline, tuple(lines), ranks, wait.operation.kind, wait.sequence, place, **flags)
