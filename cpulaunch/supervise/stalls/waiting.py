"""Find which ranks wait for which: match their last collectives and messages by group and sequence number."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cpulaunch.ledger import COMPLETED, ENQUEUED, FAILED, MEETINGS, STARTED, Group, Operation
from cpulaunch.model.cores import CoreSet

_SAME_SIZE = ("all_reduce", "broadcast", "reduce")
"""Collectives with the same number of bytes on each rank."""


class Member(NamedTuple):
    """A rank's membership in a group, from the rank's own ledger."""

    rank: int
    group: Group

    def record(self, sequence: int) -> Operation | None:
        """Return the collective with number ``sequence``, if the ledger still has it."""
        return next((op for op in self.collectives if op.sequence == sequence), None)

    @property
    def collectives(self) -> list[Operation]:
        return [op for op in self.group.operations if not op.is_message]

    @property
    def reached(self) -> int:
        """The sequence number of the last collective that the rank has called; -1 if there is none."""
        return max((op.sequence for op in self.collectives), default=-1)

    @property
    def completed(self) -> Operation | None:
        """The last collective that the rank has completed."""
        done = (op for op in self.collectives if op.state == COMPLETED)
        return max(done, key=lambda op: op.sequence, default=None)

    @property
    def made(self) -> bool:
        """Whether the group exists; False while it is being created."""
        return bool(self.group.backend)


class Wait(NamedTuple):
    """A collective, or a message (``message``), that doesn't complete: number ``sequence`` of ``group``.

    ``operations`` maps the ranks that have called it to their records.  ``waiting`` are the ranks that have
    called it and still wait, and ``missing`` the ranks that have not called it.  ``unknown`` are the numbers,
    in the group, of members that haven't answered; all other numbers are ranks of the job.
    """

    group: Group
    sequence: int
    operations: Mapping[int, Operation]
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]
    members: Mapping[int, Member]
    ranks: Mapping[int, int]  # rank in the group → rank in the job
    message: bool = False

    @property
    def operation(self) -> Operation:
        """The operation of the first waiting rank, or if no rank waits, of any rank."""
        return next(self.operations[rank] for rank in (*self.waiting, *self.operations))

    @property
    def meets(self) -> bool:
        """Whether this is the creation of the group, not a collective."""
        return self.operation.kind in MEETINGS

    @property
    def absent(self) -> set[int]:
        """The ranks that have not called the operation, or have not answered."""
        return {*self.missing, *(self.ranks[number] for number in self.unknown if number in self.ranks)}

    @property
    def roots_differ(self) -> bool:
        """Whether the known roots of the ranks' calls differ."""
        return _differ(op.root for op in self.operations.values())

    @property
    def reductions_differ(self) -> bool:
        """Whether the known reductions of the ranks' calls differ."""
        return _differ(op.reduction for op in self.operations.values())

    def kinds(self) -> list[list[int]]:
        return _kinds(self.operations)

    def between(self, pair: Collection[int]) -> Wait:
        """Return the wait with the operations of the two ranks in ``pair`` only.

        A message has only the operation of one end.  Add the peer's last operation in the opposite direction,
        if its size is different.
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
        """Return pairs of a waiting rank and a rank that it waits for, according to the process group.

        If any ranks wait for each other, return only these pairs.
        """
        waits = {
            (rank, self.ranks[other])
            for rank in self.waiting
            for other in numbers(self.operations[rank].waits_for)
            if other in self.ranks
        }
        mutual = {(a, b) for a, b in waits if (b, a) in waits}
        return sorted((a, b) for a, b in mutual if a < b) or sorted(waits)


def _kinds(operations: Mapping[int, Operation]) -> list[list[int]]:
    """Group the ranks by those values of their calls that must be equal, the largest group first."""
    roots_differ = _differ(op.root for op in operations.values())
    reductions_differ = _differ(op.reduction for op in operations.values())
    found: dict[tuple[object, ...], list[int]] = {}
    for rank, op in sorted(operations.items()):
        size = op.bytes if op.kind in _SAME_SIZE else -1
        root = op.root if roots_differ else -1
        by = op.reduction if reductions_differ else ""
        found.setdefault((op.kind, op.type, size, root, by), []).append(rank)
    return sorted(found.values(), key=lambda ranks: -len(ranks))


def _differ(known: Iterable[int | str]) -> bool:
    """Whether the values differ, ignoring the unknown values -1 and ""."""
    return len(set(known) - {-1, ""}) > 1


def numbers(text: str) -> list[int]:
    """Parse a list such as ``"3, 7"``, which may be cut off."""
    return [int(word) for word in text.replace(",", " ").split() if word.isdigit()]


def waits(
    groups: Mapping[int, Iterable[Mapping[str, Any]]], world_size: int, *, failed: bool = False
) -> list[Wait]:
    """Find operations that don't complete, from the ``groups`` of each rank's ``Dump``.

    Collectives come first, and large groups before small ones.  ``failed``: include operations that failed.
    """
    states = (ENQUEUED, STARTED, FAILED) if failed else (ENQUEUED, STARTED)
    found: list[Wait] = []
    by_group = list(_by_group(groups))
    made = {(member.rank, member.group.name) for members in by_group for member in members if member.made}
    for members in by_group:
        names = _names(members, world_size)
        # While some ranks still create the group, a rank that has already created it is not missing.
        ready = {number for number, rank in names.items() if (rank, members[0].group.name) in made}
        found += _collective(members, names, states, ready)
        found += _messages(members, names, states)
    return sorted(found, key=lambda wait: (wait.message, -wait.group.size))


def disagreements(groups: Mapping[int, Iterable[Mapping[str, Any]]], world_size: int) -> list[Wait]:
    """Find the first collective of each group whose calls differ, whether or not it has completed."""
    found = []
    for members in _by_group(groups):
        calls = _by_sequence(members)
        differing = [sequence for sequence, called in calls.items() if len(_kinds(called)) > 1]
        if differing:
            names = _names(members, world_size)
            found.append(_wait(members, names, min(differing), (ENQUEUED, STARTED, FAILED)))
    return found


def _names(members: list[Member], world_size: int) -> dict[int, int]:
    """Return a map: rank in the group → rank in the job."""
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
        if max(again.values()) == 1:  # otherwise several groups have this name
            yield members


def _collective(
    members: list[Member], names: Mapping[int, int], states: tuple[int, ...], ready: Collection[int]
) -> Iterator[Wait]:
    """Yield the first collective that doesn't complete.

    ``ready`` are the numbers in the group of members that are known to have created it.
    """
    calls = _by_sequence(members)
    sequences = [n for n, called in calls.items() if any(op.state in states for op in called.values())]
    if not sequences:
        return
    progress = _Progress(members, states)
    first = next((n for n in sorted(sequences) if not progress.is_past(n, calls[n])), min(sequences))
    yield _wait(members, names, first, states, ready)


def _by_sequence(members: list[Member]) -> dict[int, dict[int, Operation]]:
    """Return the collectives of all members: sequence number → rank → operation."""
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
    ready: Collection[int] = (),
) -> Wait:
    group = members[0].group
    called = {member.rank: op for member in members if (op := member.record(sequence))}
    known = {member.group.rank for member in members} | set(ready if group.members else ())
    return Wait(
        group=group,
        sequence=sequence,
        operations=called,
        waiting=tuple(rank for rank, op in called.items() if op.state in states),
        missing=tuple(member.rank for member in members if member.reached < sequence),
        unknown=tuple(number for number in range(group.size) if number not in known),
        members={member.rank: member for member in members},
        ranks=names,
    )


class _Progress:
    """The progress of a group's members.  `is_past` costs time only for the ranks in its ``calls``."""

    def __init__(self, members: list[Member], states: tuple[int, ...]) -> None:
        self._states = states
        self._reached = {member.rank: member.reached for member in members}
        self._open = {  # rank → the number of the last operation in which it waits
            member.rank: max((op.sequence for op in member.collectives if op.state in states), default=-1)
            for member in members
        }
        self._all_reached, self._all_open = sorted(self._reached.values()), sorted(self._open.values())

    def is_past(self, sequence: int, calls: Mapping[int, Operation]) -> bool:
        """Whether a collective has really completed, although some ranks seem to wait in it.

        This is assumed if all members have called it in the same way, it has not failed, and another member
        waits in a later collective.  gloo's completions are recorded up to a second late, and not at all once
        a rank is stopped.
        """
        if any(op.state == FAILED for op in calls.values()):
            return False
        waiting = [rank for rank, op in calls.items() if op.state in self._states]
        behind = bisect_right(self._all_reached, sequence)
        if behind > sum(self._reached[rank] <= sequence for rank in calls):
            return False  # a member has not called it
        later = len(self._all_open) - bisect_right(self._all_open, sequence)
        some_wait_later = later > sum(self._open[rank] > sequence for rank in waiting)
        return some_wait_later and len(_kinds(calls)) == 1


def _messages(members: list[Member], names: Mapping[int, int], states: tuple[int, ...]) -> Iterator[Wait]:
    """Yield the first message of each member that doesn't complete."""
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
    """Whether the peer waits at the other end of a message."""
    return any(
        op.peer == member.group.rank and op.state in (ENQUEUED, STARTED) and op.kind != message.kind
        for op in peers.operations
    )
