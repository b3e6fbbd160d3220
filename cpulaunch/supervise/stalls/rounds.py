"""Ask the ranks for their stacks, for ``cpulaunch stacks``.  Pure.

An agent needs long to get frames of C and C++.  So only one of the ranks with the same Python stack is asked
for these frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cpulaunch.messages import Dump
from cpulaunch.supervise.job.events import DumpFinished, Send
from cpulaunch.supervise.stalls.inquiry import ANSWER_WITHIN, Inquiry, Question
from cpulaunch.supervise.stalls.stacks import Frame, Process, main_thread, threads_of


@dataclass(eq=False)
class Round:
    """One round of questions: ``first`` asks all ranks for their Python stacks.

    ``native``: ``closer`` then asks one rank of each group for frames of C and C++.
    """

    native: bool
    first: Question
    closer: Question | None = None
    groups: Groups | None = None

    @property
    def question(self) -> Question:
        return self.closer or self.first

    def result(self) -> DumpFinished:
        answers = self.first.answers
        for rank, dump in self.closer.answers.items() if self.closer else ():
            if dump.processes:
                self.first.keep(rank, dump)
            for other in (self.groups or {}).get(rank, ()):
                self.first.keep(other, with_native_frames(rank, dump, answers[other]))
        return DumpFinished(self.native, answers, sorted(self.first.ranks - answers.keys()))


class Rounds:
    """The rounds of one attempt.  Equal requests at the same time share a round."""

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self._open: list[Round] = []

    def ask(self, ranks: Iterable[int], native: bool, now: float) -> list[Send]:
        """Start a round unless an equal one is open.  Returns the messages to send."""
        wanted = frozenset(ranks)
        if any(each.native == native and each.first.ranks == wanted for each in self._open):
            return []
        question, sends = self._inquiry.ask(wanted, now + ANSWER_WITHIN, ledgers=False)
        self._open.append(Round(native, question))
        return sends

    def look(self, now: float) -> list[Send | DumpFinished]:
        """Return messages that ask for frames of C and C++, and the results of rounds that are now over."""
        actions: list[Send | DumpFinished] = []
        for each in [each for each in self._open if each.question.is_over(now)]:
            if each.native and each.closer is None:
                each.groups = group_by_stack(each.first.answers)
                asked = self._inquiry.ask(each.groups, now + ANSWER_WITHIN, native=each.groups, ledgers=False)
                each.closer = asked[0]
                actions += asked[1]
            if each.question.is_over(now):
                self._open.remove(each)
                actions.append(each.result())
        return actions

    @property
    def due(self) -> float | None:
        """The latest time to call `look`; None if no round is open."""
        return min((each.question.due for each in self._open), default=None)


Groups = dict[int, list[int]]
"""Rank → the other ranks with the same stack."""


def group_by_stack(answers: Mapping[int, Dump]) -> Groups:
    """Group ranks by the stacks of their main threads: the first rank of each group → the others.

    A rank without a stack is a group of its own.
    """
    first: dict[Any, int] = {}
    found: Groups = {}
    for rank, dump in sorted(answers.items()):
        program = next(iter(dump.processes), None)
        if program is None:
            continue
        if key := _key(program):
            found.setdefault(first.setdefault(key, rank), []).append(rank)
        else:
            found[rank] = [rank]
    return {rank: others[1:] for rank, others in found.items()}


def with_native_frames(rank: int, closer: Dump, dump: Dump) -> Dump:
    """Return ``dump`` with frames of C and C++ from ``closer``, the dump of ``rank``.

    They are added to threads with the same Python frames.  If the main thread of ``rank`` has gone on in the
    meantime, an error is added instead.
    """
    threads = [thread for process in closer.processes for thread in threads_of(process)]
    known = {place: thread["frames"] for thread in threads if (place := _python(thread))}
    if _of_main(dump.processes[0]) not in known:
        why = f"has no frames of C: they were to come from rank {rank}, which has gone on"
        return dump._replace(error="; ".join(filter(None, (dump.error, why))))
    processes = [
        {
            **process,
            "threads": [
                {**thread, "frames": known.get(_python(thread), thread["frames"])}
                for thread in threads_of(process)
            ],
            "native_of": rank,
        }
        for process in dump.processes
    ]
    return dump._replace(processes=processes)


def _key(program: Process) -> tuple[Any, ...] | None:
    """Return the main thread's Python frames, state and kernel function, which are equal within a group."""
    main = _of_main(program)
    return (main, program.get("state"), program.get("wchan")) if main else None


def _of_main(program: Process) -> tuple[Frame, ...]:
    return _python(main) if (main := main_thread(program)) else ()


def _python(thread: Process) -> tuple[Frame, ...]:
    return tuple(frame for frame in (Frame(*each) for each in thread["frames"]) if frame.is_python)
