"""Asking agents what their programs are doing, and waiting for all answers.  Pure.

An answer may have hundreds of kilobytes, and thousands come at the same time.  Most ranks do the same, so a
stack is held once, however many have it, and only one of them is asked for frames of C and C++.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cpulaunch.messages import AskDump, Dump
from cpulaunch.supervise.job.events import Send
from cpulaunch.supervise.stalls.stacks import Frame, Process

ANSWER_WITHIN = 10.0
"""Seconds after which a rank that hasn't answered is left out.  Agents take two seconds less at most."""

MAX_FRAMES = 200_000
"""Frames of different stacks that are held in full."""

INNERMOST = 4
"""Of other stacks so many are, and those of main threads alone."""


class Stacks:
    """Stacks that have been seen, each held once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}
        self._frames = 0

    def share(self, processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The processes of a ``Dump`` with the stacks that are held already."""
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


class Answers(dict[int, Dump]):
    """What ranks have answered."""

    def __init__(self) -> None:
        self._stacks = Stacks()

    def keep(self, rank: int, dump: Dump) -> None:
        """An answer has come."""
        self[rank] = dump._replace(processes=self._stacks.share(dump.processes))


@dataclass
class Round:
    """One question to ``ranks``; it is over when none is ``waiting``, or at ``due``.

    Where frames of C and C++ are wanted (``native``), it has a second part: who is ``closer`` looked at, and
    for whom else.
    """

    request: int
    native: bool
    ranks: frozenset[int]
    due: float
    waiting: set[int]
    answers: Answers = field(default_factory=Answers)
    closer: Alike | None = None

    @property
    def is_over(self) -> bool:
        """Whether all that is wanted is there, but for what doesn't come in time."""
        return self.closer is not None or not self.native

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
        return opened, [Send(rank, AskDump(opened.request, False)) for rank in sorted(wanted)]

    def said(self, rank: int, dump: Dump) -> None:
        """An answer has come."""
        for each in self._open:
            if each.request == dump.request and rank in each.waiting:
                each.waiting.discard(rank)
                dump = dump._replace(groups=[])  # which only a report of a stall shows
                if each.closer is None or dump.processes:
                    each.answers.keep(rank, dump)
                for other in (each.closer or {}).get(rank, ()):
                    each.answers.keep(other, as_seen_on(rank, dump, each.answers[other]))

    def gone(self, rank: int) -> None:
        """No answer will come from a rank any more."""
        for each in self._open:
            each.waiting.discard(rank)

    def look_closer(self, now: float) -> list[Send]:
        """What to send for the frames of C and C++ of ranks that have shown where they are in Python."""
        sends = []
        for each in self._open:
            if each.is_over or (each.waiting and now < each.due):
                continue
            self._requests += 1
            each.request, each.due, each.closer = self._requests, now + ANSWER_WITHIN, alike(each.answers)
            each.waiting = set(each.closer)
            sends += [Send(rank, AskDump(each.request, True)) for rank in sorted(each.waiting)]
        return sends

    def take(self, now: float) -> list[Round]:
        """The rounds that are over; they are not returned again."""
        if not self._open:
            return []
        over = [each for each in self._open if each.is_over and (not each.waiting or now >= each.due)]
        self._open = [each for each in self._open if each not in over]
        return over

    @property
    def due(self) -> float | None:
        """When a round is over at the latest."""
        return min((each.due for each in self._open), default=None)


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
