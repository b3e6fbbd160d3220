"""Ranks that do the same in Python: one of them shows the frames of C and C++ for all.  Pure.

py-spy reads the symbols of all of a process's libraries for these, which takes half a second of a core, and
Python's frames take a hundredth of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpulaunch.messages import Dump
from cpulaunch.supervise.stalls.stacks import Frame, Process

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
