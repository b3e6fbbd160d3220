"""Small traces of ranks in the format of torch's profiler."""

from __future__ import annotations

import io
import json
from typing import Any

from cpulaunch.trace.merge import Source, merge

BASE = 1790857026_000000000
"""Nanoseconds that torch's times are counted from."""

START = 5_000_000_000
"""Start of a trace on its host's monotonic clock, in nanoseconds."""


class Recorded:
    """The trace of one rank, of ``steps`` steps of ``length`` microseconds each, from step 10 on.

    The host's monotonic clock is ``ahead`` seconds ahead of the launcher's.
    """

    def __init__(
        self, rank: int, host: str = "node0", *, steps: int = 2, length: float = 1000.0, ahead: float = 0.0
    ) -> None:
        self.rank, self.host, self.ahead, self.pid = rank, host, ahead, 4700 + rank
        self.began = START + int(ahead * 1e9)
        self.wall = BASE + 77_000_000_000 - self.began  # from the wall clock to the monotonic one
        self.borders = [(9 + n, self.began + int(n * length * 1e3)) for n in range(steps + 1)]
        self.events: list[dict[str, Any]] = []
        self.notes: list[tuple[str, str, int, str, int]] = []
        self.throttled = 0.0
        self.far_memory: float | None = None

    def add(
        self, name: str, at: float, duration: float, *, thread: int = 0, cat: str = "cpu_op", **args: Any
    ) -> Recorded:
        """Add an event ``at`` microseconds after the beginning."""
        ts = 77_000_000 + at
        thread = thread or self.pid
        self.events.append(
            {
                "ph": "X", "cat": cat, "name": name, "pid": self.pid, "tid": thread, "ts": ts,
                "dur": duration, "args": {"Ev Idx": 1, **args},
            }
        )  # fmt: skip
        return self

    def collective(
        self,
        kind: str,
        at: float,
        duration: float,
        number: int | None,
        group: str = "0",
        backend: str = "ccl",
    ) -> Recorded:
        """Add a collective.  If ``number`` is given, the program's records have it."""
        self.add(f"{backend}:{kind}", at, duration, cat="user_annotation")
        if number is not None:
            self.notes.append((backend, group, number, kind, self.began + int(at * 1e3)))
        return self

    def text(self) -> str:
        about = {
            "steps": self.borders, "wall": self.wall, "operations": self.notes, "migrations": 3, "threads": 1,
            "throttled": self.throttled, "far_memory": self.far_memory,
        }  # fmt: skip
        named = {
            "ph": "M", "name": "thread_name", "ts": 0.0, "pid": self.pid, "tid": self.pid,
            "args": {"name": f"thread {self.pid} (python)"},
        }  # fmt: skip
        spans = {"ph": "M", "name": "process_sort_index", "pid": "Spans", "tid": 0, "args": {"sort_index": 1}}
        header = json.dumps({"schemaVersion": 1, "cpulaunch": about, "baseTimeNanoseconds": BASE}, indent=2)
        events = json.dumps([named, *self.events, spans], indent=2)
        return header.rstrip("}\n") + f',\n"traceEvents": {events},\n"traceName": "x"\n}}'

    def source(self, text: str | None = None) -> Source:
        uncertain = 0.0001 if self.ahead else 0.0
        return Source(
            self.rank, self.host, io.StringIO(self.text() if text is None else text), -self.ahead, uncertain
        )


def merged(*recorded: Recorded) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the events of the merged trace, and the data kept for the figures."""
    events: list[dict[str, Any]] = []
    return events, merge([each.source() for each in recorded], events.append)
