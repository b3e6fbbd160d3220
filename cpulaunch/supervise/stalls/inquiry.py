"""Ask agents for dumps of their programs.  Pure.

A dump may have hundreds of kilobytes, and thousands of dumps may arrive at the same time.  Most ranks have
the same stacks, so equal stacks are kept only once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from cpulaunch.messages import AskDump, Dump
from cpulaunch.supervise.job.events import Send

ANSWER_WITHIN = 10.0
"""Seconds to wait for a rank's answer.  An agent needs at most two seconds less."""

MAX_FRAMES = 200_000
"""Maximum number of frames in the pool of stacks."""

INNERMOST = 4
"""Number of innermost frames that are kept of a main thread once the pool is full.

Other threads are then left out.
"""


class Stacks:
    """A pool of stacks, which has equal stacks only once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}
        self._frames = 0

    def share(self, processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the processes of a ``Dump`` with the stacks of the pool."""
        return [
            {**process, "threads": [self._shared(thread) for thread in self._held(process["threads"])]}
            if process.get("threads")
            else process
            for process in processes
        ]

    @property
    def _full(self) -> bool:
        return self._frames >= MAX_FRAMES

    def _held(self, threads: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [thread for thread in threads if thread["name"] == "MainThread" or not self._full]

    def _shared(self, thread: dict[str, Any]) -> dict[str, Any]:
        frames = thread["frames"]
        key = tuple(map(tuple, frames))
        if (known := self._known.get(key)) is None and self._full:
            frames = frames[:INNERMOST]
            key = tuple(map(tuple, frames))
            known = self._known.get(key)
        if known is None:
            known = self._known[key] = frames
            self._frames += len(frames)
        return {**thread, "frames": known}


@dataclass(eq=False)
class Question:
    """A question to ``ranks``.  It collects ``answers`` until all ranks have answered, or until ``due``.

    ``waiting`` are the ranks that may still answer.  ``ledgers``: keep the groups of their ledgers, too.
    """

    request: int
    ranks: frozenset[int]
    due: float
    ledgers: bool
    waiting: set[int]
    answers: dict[int, Dump] = field(default_factory=dict)
    _stacks: Stacks = field(default_factory=Stacks)

    def keep(self, rank: int, dump: Dump) -> None:
        self.answers[rank] = dump._replace(processes=self._stacks.share(dump.processes))

    def is_over(self, now: float) -> bool:
        """Whether no more answers are expected."""
        return not self.waiting or now >= self.due


class Inquiry:
    """The questions of one attempt.  The caller of `ask` keeps the `Question`, which collects the answers."""

    def __init__(self) -> None:
        self._requests = 0
        self._open: dict[int, Question] = {}

    def ask(
        self,
        ranks: Iterable[int],
        due: float,
        *,
        native: Collection[int] = (),
        fresh: bool = False,
        ledgers: bool = True,
    ) -> tuple[Question, list[Send]]:
        """Ask ``ranks`` for dumps; ranks that are in ``native`` also for frames of C and C++.

        ``fresh``: the ledgers must have all collectives up to now.  Returns the question and the messages to
        send.
        """
        self._requests += 1
        number, wanted = self._requests, frozenset(ranks)
        question = self._open[number] = Question(number, wanted, due, ledgers, set(wanted))
        return question, [Send(rank, AskDump(number, rank in native, fresh)) for rank in sorted(wanted)]

    def store_answer(self, rank: int, dump: Dump, now: float) -> None:
        """Store an answer; one that comes too late is dropped."""
        question = self._open.get(dump.request)
        if question is None or rank not in question.waiting:
            return
        if not question.is_over(now):
            question.keep(rank, dump if question.ledgers else dump._replace(groups=[]))
        question.waiting.discard(rank)
        if not question.waiting:
            del self._open[dump.request]

    def remove_rank(self, rank: int) -> None:
        for question in self._open.values():
            question.waiting.discard(rank)
        self._open = {number: each for number, each in self._open.items() if each.waiting}
