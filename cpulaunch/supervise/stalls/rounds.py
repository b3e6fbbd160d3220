"""Ask the ranks what they are doing, for ``cpulaunch stacks``.  Pure.

Frames of C and C++ take an agent long.  So of the ranks with the same Python stack, only one is asked for
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cpulaunch.messages import Dump
from cpulaunch.supervise.job.events import Dumped, Send
from cpulaunch.supervise.stalls.inquiry import ANSWER_WITHIN, Answers, Inquiry, Question
from cpulaunch.supervise.stalls.stacks import Frame, Process, main_thread, threads_of


@dataclass(eq=False)
class Round:
    """One round of questions: all ranks are asked for their Python stacks.

    For ``native`` frames, some ranks are asked again.  ``alike`` maps each of these to the ranks that it
    represents.
    """

    native: bool
    first: Question
    closer: Question | None = None
    alike: Alike | None = None

    @property
    def question(self) -> Question:
        return self.closer or self.first

    def seen(self) -> Dumped:
        answers = self.first.answers
        for rank, dump in (self.closer.answers if self.closer else Answers()).items():
            if dump.processes:
                answers.keep(rank, dump)
            for other in (self.alike or {}).get(rank, ()):
                answers.keep(other, as_seen_on(rank, dump, answers[other]))
        return Dumped(self.native, answers, sorted(self.first.ranks - answers.keys()))


class Rounds:
    """The rounds of one attempt.  A request that equals an open one shares its round."""

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self._open: list[Round] = []

    def ask(self, ranks: Iterable[int], native: bool, now: float) -> list[Send]:
        """Ask ``ranks``, unless an equal round is open.  Returns the messages to send."""
        wanted = frozenset(ranks)
        if any(each.native == native and each.first.ranks == wanted for each in self._open):
            return []
        question, sends = self._inquiry.ask(wanted, now + ANSWER_WITHIN, ledgers=False)
        self._open.append(Round(native, question))
        return sends

    def look(self, now: float) -> list[Send | Dumped]:
        """Return messages that ask for frames of C and C++, and the results of rounds that are over.

        Each result is returned once.
        """
        actions: list[Send | Dumped] = []
        for each in [each for each in self._open if each.question.is_over(now)]:
            if each.native and each.closer is None:
                each.alike = alike(each.first.answers)
                asked = self._inquiry.ask(each.alike, now + ANSWER_WITHIN, native=each.alike, ledgers=False)
                each.closer = asked[0]
                actions += asked[1]
            if each.question.is_over(now):
                self._open.remove(each)
                actions.append(each.seen())
        return actions

    @property
    def due(self) -> float | None:
        """When to call `look` at the latest; None if no round is open."""
        return min((each.question.due for each in self._open), default=None)


Alike = dict[int, list[int]]
"""Rank → the other ranks with the same stack."""


def alike(answers: Mapping[int, Dump]) -> Alike:
    """Group ranks by their main threads: the first rank of each group → the others.

    A rank without a stack is a group of its own.
    """
    first: dict[Any, int] = {}
    found: Alike = {}
    for rank, dump in sorted(answers.items()):
        program = next(iter(dump.processes), None)
        if program is None:
            continue
        if key := _key(program):
            found.setdefault(first.setdefault(key, rank), []).append(rank)
        else:
            found[rank] = [rank]
    return {rank: others[1:] for rank, others in found.items()}


def as_seen_on(rank: int, closer: Dump, dump: Dump) -> Dump:
    """Return ``dump`` with the frames of C and C++ of ``rank``, for threads with the same Python frames.

    ``closer`` is the dump of ``rank``.  If the stack of its main thread has changed since, an error is added
    instead.
    """
    threads = [thread for process in closer.processes for thread in threads_of(process)]
    known = {place: thread["frames"] for thread in threads if (place := _python(thread))}
    if _of_main(dump.processes[0]) not in known:
        why = f"has shown no frames of C: rank {rank}, which did the same, has gone on since"
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
    """Return what equal ranks have in common: the main thread's Python frames, state and kernel function."""
    main = _of_main(program)
    return (main, program.get("state"), program.get("wchan")) if main else None


def _of_main(program: Process) -> tuple[Frame, ...]:
    return _python(main) if (main := main_thread(program)) else ()


def _python(thread: Process) -> tuple[Frame, ...]:
    return tuple(frame for frame in (Frame(*each) for each in thread["frames"]) if frame.is_python)
