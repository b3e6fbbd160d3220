"""Asking agents what their programs are doing, and waiting for all answers.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cpulaunch.messages import AskDump, Dump
from cpulaunch.supervise.events import Send

ANSWER_WITHIN = 10.0
"""Seconds after which a rank that hasn't answered is left out.  Agents take two seconds less at most."""


@dataclass
class Round:
    """One question to ``ranks``; it is over when none is ``waiting``, or at ``due``."""

    request: int
    native: bool
    ranks: frozenset[int]
    due: float
    waiting: set[int]
    answers: dict[int, Dump] = field(default_factory=dict)

    @property
    def silent(self) -> list[int]:
        """Ranks that have not answered."""
        return sorted(self.ranks - self.answers.keys())


class Dumps:
    """The rounds of one attempt.  Who asks while the same question is open gets its answers, too."""

    def __init__(self) -> None:
        self._requests = 0
        self._open: list[Round] = []

    def ask(self, ranks: Iterable[int], native: bool, now: float) -> tuple[Round, list[Send]]:
        """The round that will have the answers, and what to send for them."""
        wanted = frozenset(ranks)
        for each in self._open:
            if each.native == native and each.ranks == wanted:
                return each, []
        self._requests += 1
        opened = Round(self._requests, native, wanted, now + ANSWER_WITHIN, set(wanted))
        self._open.append(opened)
        return opened, [Send(rank, AskDump(opened.request, native)) for rank in sorted(wanted)]

    def said(self, rank: int, dump: Dump) -> None:
        """An answer has come."""
        for each in self._open:
            if each.request == dump.request and rank in each.waiting:
                each.waiting.discard(rank)
                each.answers[rank] = dump

    def gone(self, rank: int) -> None:
        """No answer will come from a rank any more."""
        for each in self._open:
            each.waiting.discard(rank)

    def take(self, now: float) -> list[Round]:
        """The rounds that are over; they are not returned again."""
        if not self._open:
            return []
        over = [each for each in self._open if not each.waiting or now >= each.due]
        self._open = [each for each in self._open if each not in over]
        return over

    @property
    def due(self) -> float | None:
        """When a round is over at the latest."""
        return min((each.due for each in self._open), default=None)
