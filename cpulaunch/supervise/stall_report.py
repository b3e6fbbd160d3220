"""Why a job makes no progress: the explanation of what all ranks have been seen to do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from cpulaunch.messages import Dump
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.names import INSTANCE, RANKS, Names
from cpulaunch.supervise import whereabouts
from cpulaunch.supervise.stacks import Frame, Process, outlives
from cpulaunch.supervise.waiting import Wait, waits
from cpulaunch.wording import counted, shortened

MAX_SITUATIONS = 4
"""Ranks that are described one by one."""

MAX_SIDES = 8
"""Lines of what ranks call that can't agree on it."""

MAX_CHILDREN = 4
"""Children of a rank that are described."""

_NO_LEDGER = "programs that cpulaunch doesn't run as Python, or without a process group, keep no ledger"


@dataclass(frozen=True)
class Seen:
    """What is known of a rank.

    ``left`` is how it ended, if it did; ``dump`` its agent's answer, if any; ``raised_at`` where an exception
    was raised, if one was.  ``now`` is what its host's clock shows when that is told.  ``leaving``: its
    program has said that it ends.  ``collectives``: it has completed so many.
    """

    rank: int
    host: str
    left: str = ""
    dump: Dump | None = None
    raised_at: str = ""
    now: float | None = None
    leaving: bool = False
    collectives: int = 0

    @property
    def program(self) -> Process | None:
        return self.dump.processes[0] if self.dump and self.dump.processes else None

    @property
    def place(self) -> Frame | None:
        return whereabouts.place(self.program) if self.program else None

    @property
    def at(self) -> str:
        return self.at_of(0)

    def at_of(self, caller: int) -> str:
        """Where it is, or its thread with this number, which has called something."""
        return self.raised_at or (whereabouts.where(self.program, caller) if self.program else "")

    @property
    def runs(self) -> bool:
        return self.program is not None and whereabouts.runs(self.program)

    @property
    def held(self) -> str:
        return whereabouts.held(self.program) if self.program else ""


@dataclass(frozen=True)
class Explanation:
    """``headline`` is a clause; ``ranks`` are those that the others wait for, empty where nobody is.

    ``place`` is the line of the first of these.  ``disagree``: ranks have called different operations.
    ``certain``: it won't go on, however long anybody may need.  ``mutual``: ``ranks`` wait for each other, so
    that none of them is to blame more than the others.  ``advice``: what becomes of it, or what can be done.
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
    advice: str = ""


def explain(seen: Sequence[Seen], paused: float = 0.0, names: Names = RANKS) -> Explanation:
    """The first of the known causes that fits; ``seen`` are all ranks of the job, in their order.

    It was ``paused`` for so many seconds, which are those since the last operation of a rank, too, where
    clocks don't show a whole second more or less.
    """
    groups = {each.rank: each.dump.groups for each in seen if each.dump}
    return _Case(seen, waits(groups, len(seen)), paused, names).explain()


def sides(seen: Sequence[Seen], *, said: bool) -> list[str]:
    """What ranks have called that can't agree on it, and where, a line for each side; those of most first.

    One line where they differ only in what the ledger doesn't have, and have called it at the same line.

    Operations that have failed count as if they were waited in.  ``said``: the process group says that they
    differ, be it in something that the ledger doesn't have, such as a root.
    """
    groups = {each.rank: each.dump.groups for each in seen if each.dump}
    found = waits(groups, len(seen), failed=True)
    differing = [wait for wait in found if len(wait.kinds()) > 1]
    candidates = differing or (found if said else [])
    lines = [_Case(seen, found).sides(wait) for wait in candidates if len(wait.operations) > 1]
    return max(lines, key=len, default=[]) if said else next((each for each in lines if len(each) > 1), [])


def without(seen: Sequence[Seen]) -> list[str]:
    """Who has failed in an operation, and who runs without being in its group any more; a line for each."""
    groups = {each.rank: each.dump.groups for each in seen if each.dump}
    found = waits(groups, len(seen), failed=True)
    case = _Case(seen, found)
    for wait in found:
        numbers = (wait.ranks[number] for number in wait.unknown if number in wait.ranks)
        if gone := [rank for rank in numbers if case.seen[rank].program]:
            return [case.side(wait, wait.waiting[:1]), *case.situations(gone, wait)]
    return []


def gone(seen: Sequence[Seen]) -> tuple[str, list[str]] | None:
    """Who has left without calling what others have failed in, and those; None where it isn't known."""
    groups = {each.rank: each.dump.groups for each in seen if each.dump}
    found = waits(groups, len(seen), failed=True)
    case = _Case(seen, found)
    for wait in found:
        if left := sorted(rank for rank in wait.absent if case.seen[rank].left):
            operation = what(wait, wait.waiting[0], short=True)
            return has_left(seen, left, operation), [case.side(wait, wait.waiting)]
    return None


def has_left(seen: Sequence[Seen], ranks: Collection[int], operation: str = "") -> str:
    """The headline where ``ranks`` have, without calling the ``operation``."""
    how = dict.fromkeys(each.left for each in seen if each.rank in ranks)
    who = _Case(seen, ()).named(ranks)
    without = f" without calling {operation}" if operation else ""
    return f"{who} {_have(ranks)} left ({shortened(list(how))}){without}"


class _Case:
    def __init__(
        self, seen: Sequence[Seen], found: Sequence[Wait], paused: float = 0.0, names: Names = RANKS
    ) -> None:
        self.seen, self.paused, self.names = {each.rank: each for each in seen}, paused, names
        # A rank that runs has asked for a message, but doesn't wait for it.
        self.waits = [wait for wait in found if not (wait.message and self.seen[wait.waiting[0]].runs)]
        self.held_in_headline = ""

    def explain(self) -> Explanation:
        rules = (
            self._disagreement,
            self._missing,
            self._unmet,
            self._crossed,
            self._silent,
            self._incomplete,
        )
        found = next((found for rule in rules if (found := rule())), None) or self._nobody()
        if found.place:
            return found
        if found.ranks:
            return replace(found, place=self.seen[found.ranks[0]].place)
        places = {each.place for each in self.seen.values() if not each.left}
        return replace(found, place=places.pop() if len(places) == 1 else None)

    # ---- the causes

    def _disagreement(self) -> Explanation | None:
        """Different operations, types or sizes have the same number."""
        for wait in self.waits:
            if len(kinds := wait.kinds()) > 1:
                lines = [self.side(wait, theirs) for theirs in kinds.values()]
                headline = f"ranks call different operations as #{wait.sequence} of group {wait.group.name}"
                found = self._of(wait, headline, lines, sorted(wait.operations))
                return replace(found, disagree=True, certain=True, mutual=True)
        return None

    def _missing(self) -> Explanation | None:
        """Ranks have not called an operation that others wait in, and wait in no other themselves."""
        waiting = {rank for wait in self.waits for rank in wait.waiting}
        candidates = []
        for wait in self.waits:
            if free := sorted(wait.absent - waiting):
                candidates.append((wait, free))
        if not candidates:
            return None
        wait, free = max(candidates, key=lambda each: len(each[0].waiting))
        left = [rank for rank in free if self.seen[rank].left]
        held = [rank for rank in free if self.seen[rank].held]
        first = left or held or free
        headline = self._of_absent(wait, free, left, held)
        others = [rank for rank in free if rank not in first]
        lines = [self._waiters(wait, free), *self.situations([*first, *others], wait)]
        certain = bool(left) or bool(not held and self._locked(free))
        return replace(self._of(wait, headline, lines, first), certain=certain)

    def _of_absent(self, wait: Wait, free: list[int], left: list[int], held: list[int]) -> str:
        """The headline; of the ranks that are ``free``, some may have ``left``, or be ``held``."""
        name = what(wait, wait.waiting[0], short=True)
        if left:
            return has_left(list(self.seen.values()), left, name)
        if all(self.seen[rank].dump is None for rank in free):
            return f"{self.named(free)} can't be seen; the others wait in {name}"
        if wait.message:
            return f"{self.named(free)} {_have(free)} not answered rank {wait.waiting[0]}'s {name}"
        if held:
            return self._held(held)
        if locked := self._locked(free):
            return f"threads of {self.named(locked)} wait for each other's locks"
        if len(free) > len(wait.waiting):
            who = f"{self.named(wait.waiting)} {_wait(wait.waiting)}"
            return f"{who} in {name}, which {counted(len(free), 'rank')} {_have(free)} not called"
        return f"{self.named(free)} {_have(free)} not called {name}"

    def _unmet(self) -> Explanation | None:
        """Ranks make a group, and others, which would have to come, wait elsewhere."""
        for wait in self.waits:
            elsewhere = [other for other in self.waits if wait.absent & set(other.waiting)]
            if not (wait.meets and elsewhere):
                continue
            those = {id(each): sorted(wait.absent & set(each.waiting)) for each in elsewhere}
            most = max(elsewhere, key=lambda each: len(those[id(each)]))
            name, other = (what(each, each.waiting[0], short=True) for each in (wait, most))
            who = f"{self.named(wait.waiting)} {_wait(wait.waiting)} in {name}"
            headline = f"{who}, {self.named(those[id(most)])} in {other}"
            lines = [self._waiters(wait, ()), *(self._of_these(each, those[id(each)]) for each in elsewhere)]
            found = self._of(wait, headline, lines, sorted({*wait.waiting, *wait.absent}))
            certain = not any(self.seen[rank].runs for rank in wait.absent)
            return replace(found, certain=certain, mutual=True)
        return None

    def _crossed(self) -> Explanation | None:
        """Ranks wait for each other in different groups."""
        circle = self._circle()
        if not circle:
            return None
        lines = []
        for rank, (wait, other) in circle.items():
            lines.append(
                f"{self.named([rank])} waits for rank {other} in {what(wait, rank)}{self.at(wait, [rank])}"
            )
        wait = next(iter(circle.values()))[0]
        if all(wait.message for wait, _ in circle.values()):
            what_for = "messages"
        elif len({wait.group.name for wait, _ in circle.values()}) == 1:
            what_for = "a collective and a message"
        else:
            what_for = "different groups"
        headline = f"{self.named(list(circle))} wait for each other in {what_for}"
        return replace(self._of(wait, headline, lines, sorted(circle)), certain=True, mutual=True)

    def _circle(self) -> dict[int, tuple[Wait, int]]:
        """Ranks that wait for one another in a circle: rank → what it waits in, and for whom."""
        edges: dict[int, tuple[Wait, int]] = {}
        for wait in self.waits:
            for rank in wait.waiting if wait.absent else ():
                edges.setdefault(rank, (wait, min(wait.absent)))
        for start in sorted(edges):
            path: dict[int, tuple[Wait, int]] = {}
            rank = start
            while rank in edges and rank not in path:
                path[rank] = edges[rank]
                rank = edges[rank][1]
            if rank in path:
                ranks = list(path)
                return {each: path[each] for each in ranks[ranks.index(rank) :]}
        return {}

    def _silent(self) -> Explanation | None:
        """Somebody is missing of whom nothing is known."""
        for wait in self.waits:
            if wait.unknown and not any(n in wait.ranks for n in wait.unknown):
                members = f"member{'s' if len(wait.unknown) > 1 else ''} {CoreSet(wait.unknown)}"
                name = what(wait, wait.waiting[0], short=True)
                group = f"the group of {wait.group.size}" if wait.meets else f"group {wait.group.name}"
                headline = f"{members} of {group} can't be seen; the others wait in {name}"
                if wait.meets and wait.group.size > len(self.seen):
                    ours = counted(len(self.seen), self.names.noun)
                    headline = f"{name} expects {wait.group.size} ranks, but this job has {ours}"
                return self._of(wait, headline, [self._waiters(wait, ())], ())
        return None

    def _incomplete(self) -> Explanation | None:
        """All have called an operation, and it doesn't complete."""
        wait = next((w for w in self.waits if not w.absent), None)
        if wait is None:
            return None
        name = what(wait, wait.waiting[0], short=True)
        lines = [f"all have called {what(wait, wait.waiting[0])}{self.at(wait, wait.waiting)}"]
        if held := [rank for rank in wait.members if self.seen[rank].held]:
            headline = self._held(held)
            return self._of(wait, headline, [*lines, *self.situations(held, wait)], held)
        pairs = [(wait.waiting[0], r) for r in self._peers(wait)] if wait.message else wait.pairs()
        if not pairs:
            return self._of(wait, f"all have called {name}, but it does not complete", lines, ())
        by_hosts: dict[frozenset[str], list[tuple[int, int]]] = {}
        for a, b in pairs:
            by_hosts.setdefault(frozenset((self.seen[a].host, self.seen[b].host)), []).append((a, b))
        ends = [self.named([rank]) for rank in pairs[0]]
        if len(by_hosts) == 1 and len(hosts := next(iter(by_hosts))) == 2:
            ends = sorted(hosts)
        headline = f"{name} does not complete between {ends[0]} and {ends[1]}"
        for those in islice(by_hosts.values(), MAX_SITUATIONS):
            waiting, others = {a for a, _ in those}, {b for _, b in those}
            lines.append(f"{self.named(waiting)} {_wait(waiting)} for {self.named(others)}")
        found = self._of(wait, headline, lines, sorted({rank for pair in pairs for rank in pair}))
        return replace(found, mutual=True)

    def _peers(self, wait: Wait) -> list[int]:
        peer = wait.ranks.get(wait.operation.peer)
        return [] if peer is None else [peer]

    def _nobody(self) -> Explanation:
        """No rank waits in an operation."""
        noun = self.names.noun
        running = [each.rank for each in self.seen.values() if not each.left]
        programs = {rank: program for rank in running if (program := self.seen[rank].program)}
        if held := [rank for rank in running if self.seen[rank].held]:
            headline = self._held(held)
            return Explanation(headline, tuple(self.situations(held)), tuple(held))
        if locked := self._locked(running):
            headline = f"threads of {self.named(locked)} wait for each other's locks"
            return Explanation(headline, tuple(self.situations(locked)), tuple(locked))
        if running and all(self.seen[rank].leaving for rank in running):
            everybody = len(running) == len(self.seen) > 1
            who = f"all {noun}s" if everybody else self.named(running)
            words = "has finished, but doesn't" if len(running) == 1 else "have finished, but don't"
            threads = [outlives(programs[rank]) if rank in programs else None for rank in running]
            why = ": threads have not ended" if all(threads) else ""
            ranks = () if everybody else tuple(running)
            return Explanation(f"{who} {words} exit{why}", tuple(self.situations(running)), ranks)
        if fed := [rank for rank in programs if whereabouts.waits_for_input(programs[rank])]:
            who = f"all {noun}s wait" if fed == running else f"{self.named(fed)} {_wait(fed)}"
            return Explanation(f"{who} for input", tuple(self.situations(fed)), tuple(fed))
        return self._somewhere(running)

    def _somewhere(self, running: Sequence[int]) -> Explanation:
        noun = self.names.noun
        places: dict[str, list[int]] = {}
        for rank in running:
            places.setdefault(self.seen[rank].at, []).append(rank)
        fewest = min(places.values(), key=len, default=[])
        has_ledger = any(each.dump and each.dump.groups for each in self.seen.values())
        ranks = tuple(fewest) if (len(places) > 1 and has_ledger) or len(running) == 1 else ()
        if len(places) == 1 and (at := next(iter(places))):
            who = f"all {noun}s are" if len(running) > 1 else f"{self.named(running)} is"
            first = self.seen[running[0]]
            headline = f"{who} {'at ' if first.place else ''}{at}"
        elif has_ledger:
            headline = f"no {noun} waits in a collective"
        else:
            who = f"the {noun}s wait" if len(running) > 1 else f"{self.named(running)} waits"
            headline = f"what {who} for isn't known"
        lines = [] if has_ledger or self.names.noun == INSTANCE else [self._why_no_groups()]
        lines += [line for theirs in places.values() for line in self.situations(theirs[:1])]
        lines += self.situations([each.rank for each in self.seen.values() if each.left])
        return Explanation(headline, tuple(lines), ranks)

    def _why_no_groups(self) -> str:
        done = max(each.collectives for each in self.seen.values())
        if not done:
            return _NO_LEDGER
        return f"no rank is in a process group any more, after {counted(done, 'collective')}"

    def _locked(self, ranks: Sequence[int]) -> list[int]:
        """Those that have a dead lock of their own."""
        programs = ((rank, self.seen[rank].program) for rank in ranks)
        return [rank for rank, program in programs if program and whereabouts.dead_lock(program)]

    # ---- words

    def sides(self, wait: Wait) -> list[str]:
        """What ranks have called as the same number, and where; equal ones in a line."""
        found: dict[str, list[int]] = {}
        for ranks in wait.kinds().values():
            for rank in ranks:
                found.setdefault(f"{what(wait, rank)}{self._at_in(wait, [rank])}", []).append(rank)
        shown = sorted(found.items(), key=lambda side: -len(side[1]))
        lines = [f"{self.named(ranks)}: {words}" for words, ranks in shown[:MAX_SIDES]]
        return lines + [f"… {len(shown) - MAX_SIDES} more"] * (len(shown) > MAX_SIDES)

    def side(self, wait: Wait, ranks: Sequence[int]) -> str:
        """What these have called, which is the same, and where."""
        return f"{self.named(ranks)}: {what(wait, ranks[0])}{self._at_in(wait, ranks)}"

    def _held(self, ranks: Sequence[int]) -> str:
        self.held_in_headline = self.seen[ranks[0]].held
        alike = [rank for rank in ranks if self.seen[rank].held == self.held_in_headline]
        return f"{self.named(alike)}: {self.held_in_headline}"

    def named(self, ranks: Iterable[int]) -> str:
        """``"rank 3 on node1"``, ``"ranks 4-7 on node1"``."""
        ranks = sorted(ranks)
        hosts = list(dict.fromkeys(self.seen[rank].host for rank in ranks))
        return f"{self.names.several(ranks)} on {shortened(hosts)}"

    def at(self, wait: Wait, ranks: Iterable[int]) -> str:
        """``", at train.py:91 main"``: the lines where ranks are that have called it."""
        callers = {rank: wait.operations[rank].thread for rank in ranks}
        places = dict.fromkeys(at for rank in callers if (at := self.seen[rank].at_of(callers[rank])))
        return f", at {shortened(list(places))}" if places else ""

    def _at_in(self, wait: Wait, ranks: Iterable[int]) -> str:
        """Where ranks have called it, or where they are now, if it is complete for all of them.

        What is complete for a rank that has raised an error may well have failed.
        """
        if there := [rank for rank in ranks if rank in wait.waiting or self.seen[rank].raised_at]:
            return self.at(wait, there)
        return self.at(wait, ranks).replace(", at ", ", which is complete there; now at ", 1)

    def _waiters(self, wait: Wait, missing: Sequence[int]) -> str:
        others = [rank for rank in self.seen if rank not in missing]
        who = "all others wait" if list(wait.waiting) == others and missing and len(others) > 1 else None
        if who is None:
            return self._of_these(wait, wait.waiting)
        return f"{who} in {what(wait, wait.waiting[0])}{self.at(wait, wait.waiting)}"

    def _of_these(self, wait: Wait, ranks: Sequence[int]) -> str:
        """What these ranks wait in, and where."""
        return f"{self.named(ranks)} {_wait(ranks)} in {what(wait, ranks[0])}{self.at(wait, ranks)}"

    def situations(self, ranks: Sequence[int], wait: Wait | None = None) -> Iterator[str]:
        for rank in ranks[:MAX_SITUATIONS]:
            yield from self._situation(self.seen[rank], wait)
        if len(ranks) > MAX_SITUATIONS:
            yield f"and {counted(len(ranks) - MAX_SITUATIONS, f'more {self.names.noun}')}"

    def _situation(self, seen: Seen, wait: Wait | None) -> Iterator[str]:
        """What a rank has done last, and where it is."""
        parts = [last] if (last := self._last(seen, wait)) else []
        name = self.named([seen.rank])
        if seen.left:
            yield f"{name} has left: {seen.left}"
            return
        if seen.place:
            feeds = seen.program and whereabouts.waits_for_input(seen.program)
            parts.append(f"{'waits for input' if feeds else 'is'} at {seen.at}")
        elif seen.at:
            parts.append(f"is {seen.at} (no stack: {_why_unseen(seen)})")
        else:
            parts.append(f"can't be seen: {_why_unseen(seen)}")
        yield f"{name} {' and '.join(parts)}"
        if seen.held and seen.held != self.held_in_headline:
            yield f"  {seen.held}"
        if not seen.dump or not seen.program:
            return
        for line in whereabouts.around_locks(seen.program):
            yield f"  {line}"
        for pid, text in islice(whereabouts.children(seen.dump.processes), MAX_CHILDREN):
            yield f"  its process {pid}: {text}"

    def _last(self, seen: Seen, wait: Wait | None) -> str:
        if wait is None or wait.message or wait.meets or seen.dump is None or seen.left:
            return ""
        member = wait.members.get(seen.rank)
        if member is None:
            # A young group may not be in its ledger yet, which nobody writes any more if it is held.
            was_there = wait.sequence > 0 and not seen.held
            name = f"group {wait.group.name}"
            return (
                f"is not in {name} any more"
                if was_there
                else f"is not known to have called anything in {name}"
            )
        done, called = member.completed, member.record(member.reached)
        if called and (done is None or called.sequence > done.sequence):
            return f"called #{called.sequence} {self._ago(seen, called.enqueued)}"
        if done is None:
            return f"has completed nothing in group {wait.group.name} yet"
        return f"finished #{done.sequence} {self._ago(seen, done.completed)}"

    def _ago(self, seen: Seen, at: float) -> str:
        assert seen.dump
        ago = (seen.dump.at if seen.now is None else seen.now) - at
        return f"{self.paused if abs(ago - self.paused) < 1 else ago:.0f} s ago"

    def _of(self, wait: Wait, headline: str, lines: Iterable[str], ranks: Iterable[int]) -> Explanation:
        first = next(iter(ranks := tuple(ranks)), -1)
        operation = wait.operations.get(first)
        program = self.seen[first].program if operation else None
        place = whereabouts.place(program, operation.thread) if operation and program else None
        return Explanation(headline, tuple(lines), ranks, wait.operation.kind, wait.sequence, place)


def what(wait: Wait, rank: int, *, short: bool = False) -> str:
    """A rank's operation: ``all_reduce #4711 of group 0, 25 MB float32``."""
    op = wait.operations[rank]
    if wait.meets:
        members = CoreSet(wait.ranks.values()) if wait.group.members and not short else ()
        return op.kind + (f" of ranks {members}" if members else "")
    by = f" ({op.reduction})" if wait.reductions_differ and op.reduction else ""
    name = f"{op.kind}{by} #{op.sequence}"
    if wait.message:
        peer = wait.ranks.get(op.peer)
        whom = f"number {op.peer} of the group" if peer is None else f"rank {peer}"
        name += f" {'to' if 'send' in op.kind else 'from'} {whom}"
    if short:
        return name
    if wait.roots_differ and op.root >= 0:
        way = "to" if op.kind in ("reduce", "gather") else "from"
        name += f" {way} rank {wait.ranks.get(op.root, op.root)}"
    return f"{name} of group {wait.group.name}" + (f", {_size(op.bytes)} {op.type}" if op.bytes else "")


def _size(count: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.{1 if count < 10 * unit else 0}f}".removesuffix(".0") + f" {name}"
    return counted(count, "byte")


def _why_unseen(seen: Seen) -> str:
    if seen.dump is None:
        return "its agent has not answered"
    said = str(seen.program.get("stacks", "")) if seen.program else ""
    if said.startswith("none: "):
        return said.removeprefix("none: ")
    return "its main thread runs no Python" if said else seen.dump.error or "it has no stack"


def _have(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait(ranks: Collection[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
