"""Who waits for whom: the ranks' last collectives and messages, matched by group and sequence number."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cpulaunch.ledger import COMPLETED, ENQUEUED, FAILED, MEETINGS, STARTED, Group, Operation
from cpulaunch.model.cores import CoreSet

_SAME_SIZE = ("all_reduce", "broadcast", "reduce")
"""Collectives that take as many bytes from each rank."""


class Member(NamedTuple):
    """A rank in a group, by the rank's own ledger."""

    rank: int
    group: Group

    def record(self, sequence: int) -> Operation | None:
        """The collective with this number, if it is still known."""
        return next((op for op in self.collectives if op.sequence == sequence), None)

    @property
    def collectives(self) -> list[Operation]:
        return [op for op in self.group.operations if not op.is_message]

    @property
    def reached(self) -> int:
        """The sequence number of the last collective that it has called; -1 where there is none."""
        return max((op.sequence for op in self.collectives), default=-1)

    @property
    def completed(self) -> Operation | None:
        """The last collective that it has completed."""
        done = (op for op in self.collectives if op.state == COMPLETED)
        return max(done, key=lambda op: op.sequence, default=None)

    @property
    def made(self) -> bool:
        """Whether the group is there, and not just being made."""
        return bool(self.group.backend)


class Wait(NamedTuple):
    """A collective, number ``sequence`` of ``group``, that doesn't complete, or a message (``message``).

    ``operations`` are the records of the ranks that have called it, ``waiting`` those of them that still
    wait, and ``missing`` the ranks that have not called it.  ``unknown`` are numbers in the group of members
    that haven't said anything.  Ranks are the job's.
    """

    group: Group
    sequence: int
    operations: Mapping[int, Operation]
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]
    members: Mapping[int, Member]
    ranks: Mapping[int, int]  # a rank of the group → one of the job
    message: bool = False

    @property
    def operation(self) -> Operation:
        """The one that waits, or where none does, a rank's."""
        return next(self.operations[rank] for rank in (*self.waiting, *self.operations))

    @property
    def meets(self) -> bool:
        """Whether it is no collective: the ranks make their group."""
        return self.operation.kind in MEETINGS

    @property
    def absent(self) -> set[int]:
        """The ranks that are not known to have called it, or anything else in the group."""
        return {*self.missing, *(self.ranks[number] for number in self.unknown if number in self.ranks)}

    @property
    def roots_differ(self) -> bool:
        """Whether ranks are known to have called it with different roots."""
        return _differ(op.root for op in self.operations.values())

    @property
    def reductions_differ(self) -> bool:
        """Whether ranks are known to reduce in different ways."""
        return _differ(op.reduction for op in self.operations.values())

    def kinds(self) -> dict[_Call, list[int]]:
        """The ranks by what they call, those of most first."""
        return _kinds(self.operations)

    def between(self, pair: Collection[int]) -> Wait:
        """With the operations of this ``pair`` of ranks only.

        Of a message, whose other end is no part of it, with what the other rank sent or asked for last that
        has another size.
        """
        operations = {rank: op for rank, op in self.operations.items() if rank in pair}
        if self.message:
            own, me = self.operation, self.members[self.waiting[0]].group.rank
            for rank in set(pair) & self.members.keys() - operations.keys():
                ends = (op for op in self.members[rank].group.operations if op.is_message and op.peer == me)
                other = [op for op in ends if op.kind != own.kind and op.bytes != own.bytes]
                operations |= {rank: max(other, key=lambda op: op.sequence)} if other else {}
        waiting = tuple(rank for rank, op in operations.items() if op.state != COMPLETED)
        return self._replace(operations=operations, waiting=waiting)

    def pairs(self) -> list[tuple[int, int]]:
        """Ranks that wait, and for whom, as the process group says; only those that wait for each other, \
where there are any."""
        waits = {
            (rank, self.ranks[other])
            for rank in self.waiting
            for other in numbers(self.operations[rank].waits_for)
            if other in self.ranks
        }
        mutual = {(a, b) for a, b in waits if (b, a) in waits}
        return sorted((a, b) for a, b in mutual if a < b) or sorted(waits)


class _Call(NamedTuple):
    """What ranks have to agree on: of what isn't known of all, or may differ, nothing."""

    kind: str
    type: str
    bytes: int
    root: int
    reduction: str


def _kinds(operations: Mapping[int, Operation]) -> dict[_Call, list[int]]:
    """The ranks by what they call, those of most first."""
    roots_differ = _differ(op.root for op in operations.values())
    reductions_differ = _differ(op.reduction for op in operations.values())
    found: dict[_Call, list[int]] = {}
    for rank, op in sorted(operations.items()):
        size = op.bytes if op.kind in _SAME_SIZE else -1
        root = op.root if roots_differ else -1
        by = op.reduction if reductions_differ else ""
        found.setdefault(_Call(op.kind, op.type, size, root, by), []).append(rank)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _differ(known: Iterable[int | str]) -> bool:
    """Whether ranks say different things, but for those of which it isn't known."""
    return len(set(known) - {-1, ""}) > 1


def numbers(text: str) -> list[int]:
    """Those in ``"3, 7"``; one that was cut off is left out."""
    return [int(word) for word in text.replace(",", " ").split() if word.isdigit()]


def waits(
    groups: Mapping[int, Iterable[Mapping[str, Any]]], world_size: int, *, failed: bool = False
) -> list[Wait]:
    """What doesn't complete, by the ``groups`` of each rank's ``Dump``; collectives of large groups first.

    ``failed``: what has failed counts, too.
    """
    states = (ENQUEUED, STARTED, FAILED) if failed else (ENQUEUED, STARTED)
    found: list[Wait] = []
    by_group = list(_by_group(groups))
    made = {(member.rank, member.group.name) for members in by_group for member in members if member.made}
    for members in by_group:
        names = _names(members, world_size)
        # Who has made the group by now is not missed where others still do.
        there = {number for number, rank in names.items() if (rank, members[0].group.name) in made}
        found += _collective(members, names, states, there)
        found += _messages(members, names, states)
    return sorted(found, key=lambda wait: (wait.message, -wait.group.size))


def disagreements(groups: Mapping[int, Iterable[Mapping[str, Any]]], world_size: int) -> list[Wait]:
    """Of each group the first collective that ranks have called in different ways, be it completed by now."""
    found = []
    for members in _by_group(groups):
        calls = _by_sequence(members)
        differing = [sequence for sequence, called in calls.items() if len(_kinds(called)) > 1]
        if differing:
            names = _names(members, world_size)
            found.append(_wait(members, names, min(differing), (ENQUEUED, STARTED, FAILED)))
    return found


def _names(members: list[Member], world_size: int) -> dict[int, int]:
    """A rank of the group → one of the job."""
    names = {member.group.rank: member.rank for member in members}
    size = members[0].group.size
    if said := members[0].group.members:
        return dict(enumerate(CoreSet.parse(said)))
    if size == world_size:
        return {number: names.get(number, number) for number in range(size)}
    return names


def _by_group(groups: Mapping[int, Iterable[Mapping[str, Any]]]) -> Iterator[list[Member]]:
    found: dict[tuple[str, str, int, str], list[Member]] = {}
    for rank, theirs in sorted(groups.items()):
        for document in theirs:
            operations = tuple(Operation(**op) for op in document["operations"])
            group = Group(**{**document, "operations": operations})
            key = group.name, group.backend, group.size, group.members
            found.setdefault(key, []).append(Member(rank, group))
    for members in found.values():
        again = Counter(member.group.rank for member in members)
        if max(again.values()) == 1:  # else several groups have this name
            yield members


def _collective(
    members: list[Member], names: Mapping[int, int], states: tuple[int, ...], there: Collection[int]
) -> Iterator[Wait]:
    """``there``: numbers in the group of those who are known to have made it."""
    calls = _by_sequence(members)
    sequences = [n for n, called in calls.items() if any(op.state in states for op in called.values())]
    if not sequences:
        return
    progress = _Progress(members, states)
    first = next((n for n in sorted(sequences) if not progress.is_past(n, calls[n])), min(sequences))
    yield _wait(members, names, first, states, there)


def _by_sequence(members: list[Member]) -> dict[int, dict[int, Operation]]:
    """Sequence number → rank → the collective with this number that the rank has called."""
    found: dict[int, dict[int, Operation]] = {}
    for member in members:
        for op in member.collectives:
            found.setdefault(op.sequence, {}).setdefault(member.rank, op)
    return found


def _wait(
    members: list[Member],
    names: Mapping[int, int],
    sequence: int,
    states: tuple[int, ...],
    there: Collection[int] = (),
) -> Wait:
    called = {member.rank: op for member in members if (op := member.record(sequence))}
    waiting = [rank for rank, op in called.items() if op.state in states]
    missing = [member.rank for member in members if member.reached < sequence]
    known = {member.group.rank for member in members} | set(there if members[0].group.members else ())
    unknown = [number for number in range(members[0].group.size) if number not in known]
    return Wait(
        members[0].group,
        sequence,
        called,
        tuple(waiting),
        tuple(missing),
        tuple(unknown),
        {member.rank: member for member in members},
        names,
    )


class _Progress:
    """How far the members of a group are.  A question costs as much as the ranks that it is about."""

    def __init__(self, members: list[Member], states: tuple[int, ...]) -> None:
        self._states = states
        self._reached = {member.rank: member.reached for member in members}
        self._open = {  # the last operation that a rank waits in
            member.rank: max((op.sequence for op in member.collectives if op.state in states), default=-1)
            for member in members
        }
        self._all_reached, self._all_open = sorted(self._reached.values()), sorted(self._open.values())

    def is_past(self, sequence: int, calls: Mapping[int, Operation]) -> bool:
        """Whether all that don't wait in this collective have completed it, and some wait in a later one.

        Then it is not the cause, if it was the same one for all of its ``calls`` and has failed for none:
        gloo's completions are noted up to a second late, and not at all once a rank is stopped.
        """
        if any(op.state == FAILED for op in calls.values()):
            return False
        waiting = [rank for rank, op in calls.items() if op.state in self._states]
        behind = bisect_right(self._all_reached, sequence)
        if behind > sum(self._reached[rank] <= sequence for rank in calls):
            return False  # some have not called it
        later = len(self._all_open) - bisect_right(self._all_open, sequence)
        some_wait_later = later > sum(self._open[rank] > sequence for rank in waiting)
        return some_wait_later and len(_kinds(calls)) == 1


def _messages(members: list[Member], names: Mapping[int, int], states: tuple[int, ...]) -> Iterator[Wait]:
    """Of each member the first message that doesn't complete."""
    by_rank = {member.rank: member for member in members}
    for member in members:
        pending = [op for op in member.group.operations if op.is_message and op.state in states]
        if not pending:
            continue
        first = min(pending, key=lambda op: op.sequence)
        peer = names.get(first.peer)
        there = peer in by_rank and _answers(first, by_rank[peer].group, member)
        yield Wait(
            member.group,
            first.sequence,
            {member.rank: first},
            (member.rank,),
            () if there or peer is None else (peer,),
            (first.peer,) if peer is None and first.peer >= 0 else (),
            by_rank,
            names,
            message=True,
        )


def _answers(message: Operation, peers: Group, member: Member) -> bool:
    """Whether the peer is at a message's other end."""
    return any(
        op.peer == member.group.rank and op.state in (ENQUEUED, STARTED) and op.kind != message.kind
        for op in peers.operations
    )
