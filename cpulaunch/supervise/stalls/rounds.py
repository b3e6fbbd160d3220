"""What ranks are doing, for those who ask by ``cpulaunch stacks``.  Pure.

Frames of C and C++ take an agent long.  So of the ranks that do the same in Python, one is asked for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cpulaunch.messages import Dump
from cpulaunch.supervise.job.events import Dumped, Send
from cpulaunch.supervise.stalls.inquiry import ANSWER_WITHIN, Answers, Inquiry, Question
from cpulaunch.supervise.stalls.stacks import Frame, Process


@dataclass(eq=False)
class Round:
    """All ranks are asked where they are in Python.  For ``native`` frames, some are asked once more.

    ``alike`` says for which others each of them stands.
    """

    native: bool
    first: Question
    closer: Question | None = None
    alike: Alike | None = None

    @property
    def question(self) -> Question:
        """The one that is waited for."""
        return self.closer or self.first

    def seen(self) -> Dumped:
        """What came of it."""
        answers = self.first.answers
        for rank, dump in (self.closer.answers if self.closer else Answers()).items():
            if dump.processes:
                answers.keep(rank, dump)
            for other in (self.alike or {}).get(rank, ()):
                answers.keep(other, as_seen_on(rank, dump, answers[other]))
        return Dumped(self.native, answers, sorted(self.first.ranks - answers.keys()))


class Rounds:
    """The rounds of one attempt.  Who asks while the same question is open gets its answers, too."""

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self._open: list[Round] = []

    def ask(self, ranks: Iterable[int], native: bool, now: float) -> list[Send]:
        """What to send."""
        wanted = frozenset(ranks)
        if any(each.native == native and each.first.ranks == wanted for each in self._open):
            return []
        question, sends = self._inquiry.ask(wanted, now + ANSWER_WITHIN, ledgers=False)
        self._open.append(Round(native, question))
        return sends

    def look(self, now: float) -> list[Send | Dumped]:
        """What to send for frames of C and C++, and what is seen by now; that is not returned again."""
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
        """When something is to be done at the latest."""
        return min((each.question.due for each in self._open), default=None)


Alike = dict[int, list[int]]
"""Ranks → those that do the same."""


def alike(answers: Mapping[int, Dump]) -> Alike:
    """The first rank of each kind, and the others; one of which no stack is known is alone."""
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
    """``dump`` with frames of C and C++ as ``rank`` shows them, for threads with the same ones of Python."""
    threads = [thread for process in closer.processes for thread in _threads(process)]
    known = {place: thread["frames"] for thread in threads if (place := _python(thread))}
    if _of_main(dump.processes[0]) not in known:
        why = f"has shown no frames of C: rank {rank}, which did the same, has gone on since"
        return dump._replace(error="; ".join(filter(None, (dump.error, why))))
    processes = [
        {
            **process,
            "threads": [
                {**thread, "frames": known.get(_python(thread), thread["frames"])}
                for thread in _threads(process)
            ],
            "native_of": rank,
        }
        for process in dump.processes
    ]
    return dump._replace(processes=processes)


def _key(program: Process) -> tuple[Any, ...] | None:
    """What ranks have in common that do the same: the main thread's place, and what the kernel says of it."""
    main = _of_main(program)
    return (main, program.get("state"), program.get("wchan")) if main else None


def _of_main(program: Process) -> tuple[Frame, ...]:
    main = (thread for thread in _threads(program) if thread["name"] == "MainThread")
    return next(map(_python, main), ())


def _python(thread: Process) -> tuple[Frame, ...]:
    """Its frames of Python."""
    return tuple(frame for frame in (Frame(*each) for each in thread["frames"]) if frame.is_python)


def _threads(process: Process) -> list[Process]:
    return process.get("threads") or []
