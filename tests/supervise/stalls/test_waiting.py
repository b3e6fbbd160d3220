"""The ranks' last collectives and messages are matched, at a low cost even for many ranks."""

from __future__ import annotations

from typing import Any

import pytest
from support.seen import group, operation

from cpulaunch.ledger import FAILED, OPERATIONS, STARTED
from cpulaunch.supervise.stalls.waiting import disagreements, waits

RANKS = 1024
PER_RECORD = 64
"""Maximum comparisons per record of the ranks' ledgers. Comparing each record with those of all other ranks
would take many more."""


class Number(int):
    """A number in a ledger that counts its comparisons, and fails if there are too many."""

    compared = 0

    @classmethod
    def _count(cls) -> None:
        cls.compared += 1
        assert cls.compared <= PER_RECORD * RANKS * OPERATIONS

    def __eq__(self, other: object) -> bool:
        self._count()
        return int.__eq__(self, other)

    def __lt__(self, other: int) -> bool:
        self._count()
        return int.__lt__(self, other)

    def __le__(self, other: int) -> bool:
        self._count()
        return int.__le__(self, other)

    def __gt__(self, other: int) -> bool:
        self._count()
        return int.__gt__(self, other)

    def __ge__(self, other: int) -> bool:
        self._count()
        return int.__ge__(self, other)

    __hash__ = int.__hash__


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    Number.compared = 0


def ledgers(*numbers: int, apart: int = 0) -> dict[int, list[dict[str, Any]]]:
    """Return the ledgers of many ranks.  They have collectives with these numbers, higher by ``apart`` with
    each rank.  The last record of each ledger is the collective in which all ranks wait.
    """
    last = operation(Number(1_000_000))
    return {
        rank: [group(rank, *(operation(Number(n + apart * rank)) for n in numbers), last, size=RANKS)]
        for rank in range(RANKS)
    }


def test_many_ranks_in_the_same_collectives_are_compared_once_each() -> None:
    (wait,) = waits(ledgers(*range(7, 7 + OPERATIONS - 1)), RANKS)
    assert (wait.sequence, len(wait.waiting), wait.missing) == (7, RANKS, ())


def test_many_ranks_behind_in_their_own_collectives_are_compared_once_each() -> None:
    """According to the other ranks' ledgers, all of these collectives are in the past."""
    groups = ledgers(*range(OPERATIONS - 1), apart=OPERATIONS)
    (wait,) = waits(groups, RANKS)
    assert (wait.sequence, len(wait.waiting)) == (1_000_000, RANKS)
    assert disagreements(groups, RANKS) == []


def test_each_rank_in_a_long_chain_of_messages_is_compared_once() -> None:
    groups = {
        Number(rank): [group(rank, operation(Number(0), "recv", peer=Number((rank + 1) % RANKS)), size=RANKS)]
        for rank in range(RANKS)
    }
    found = waits(groups, RANKS)
    assert len(found) == RANKS
    assert found[5].missing == (6,)


def test_a_failed_collective_is_not_in_the_past() -> None:
    groups = {
        0: [group(0, operation(6, state=FAILED), operation(7), size=3)],
        1: [group(1, operation(6), size=3)],
        2: [group(2, operation(6, done=9), operation(7, state=STARTED), size=3)],
    }
    (wait,) = waits(groups, 3)
    assert (wait.sequence, wait.waiting) == (6, (1,))
