"""Merges the traces of several ranks into one trace for Perfetto.

Each rank is a process in the trace, and arrows connect the parts of a collective.  Events are streamed; only
data that `trace.figures` needs are kept in memory.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TextIO

from cpulaunch.trace.match import match
from cpulaunch.trace.model import COLLECTIVE, LOADER, OPTIMIZER, Collective, Note, RankTrace, Span
from cpulaunch.trace.read import TraceError, read

METADATA = "cpulaunch"
"""Key of the data that the program adds to the profiler's trace."""

_PER_RANK = 1 << 20
"""Number of thread and arrow numbers for each rank.  They are renumbered, as two hosts may have the same."""

_LANES = 1 << 16
"""First of a rank's thread numbers for rows with collectives."""

_HIDDEN = ("Ev Idx", "External id", "Record function id", "Input Strides")
"""Arguments of events that are dropped to keep the trace small."""

Write = Callable[[dict[str, Any]], None]

BROKEN = (TraceError, OSError, EOFError, zlib.error, AttributeError, KeyError, TypeError, ValueError)
"""Exceptions from reading a file that is not a trace, or is incomplete."""


class SourceError(TraceError):
    """The file of ``rank`` is not a trace, or is incomplete."""

    def __init__(self, rank: int, why: Exception) -> None:
        super().__init__(f"{type(why).__name__}: {why}" if not isinstance(why, TraceError) else str(why))
        self.rank = rank


class Source:
    """The trace file of one rank.

    ``clock`` is the launcher's clock minus the host's, and ``uncertain`` its maximum error, in seconds.
    """

    def __init__(self, rank: int, host: str, file: TextIO, clock: float, uncertain: float) -> None:
        """Raises SourceError."""
        self.rank, self.host, self.clock, self.uncertain = rank, host, clock, uncertain
        try:
            header, self._read = read(file)
            self.about = header[METADATA]
            self._to_ours = (header.get("baseTimeNanoseconds", 0) - self.about["wall"]) / 1e3 + clock * 1e6
        except BROKEN as e:
            raise SourceError(rank, e) from e

    @property
    def origin(self) -> float:
        """Start of the trace by the launcher's clock, in microseconds."""
        return float(self.about["steps"][0][1]) / 1e3 + self.clock * 1e6

    def trace(self, origin: float) -> RankTrace:
        """Return the rank's trace without events.  Times are in microseconds since ``origin``."""
        own = self.clock * 1e6 - origin
        return RankTrace(
            self.rank,
            self.host,
            [(number, at / 1e3 + own) for number, at in self.about["steps"]],
            notes=[
                Note(backend, group, number, kind, at / 1e3 + own)
                for backend, group, number, kind, at in self.about["operations"]
            ],
            threads=self.about.get("threads", 0),
            migrations=self.about.get("migrations", 0),
            throttled=self.about.get("throttled", 0.0),
            far_memory=self.about.get("far_memory"),
            uncertain=self.uncertain * 1e6,
        )

    def events(self, origin: float) -> Iterator[dict[str, Any]]:
        """Yield the events of the rank's process, with times since ``origin``."""
        shift = round(self._to_ours - origin, 3)  # whole nanoseconds, so that nested events stay nested
        for event in self._read:
            if isinstance(event.get("pid"), int) and event.get("ph") in ("X", "s", "t", "f", "M"):
                if "ts" in event:
                    event["ts"] = round(event["ts"] + shift, 3)
                yield event


def merge(sources: Sequence[Source], write: Write, noun: str = "rank") -> list[RankTrace]:
    """Write the events of all ranks, and return the ranks' traces for `figures`.  Raises SourceError."""
    origin = min(source.origin for source in sources)
    ranks = []
    for source in sources:
        try:
            ranks.append(rank := source.trace(origin))
            process = _process(rank.rank, f"{noun} {rank.rank} · {rank.host}", write)
            _copy(source.events(origin), rank, process, write)
        except BROKEN as e:
            raise SourceError(source.rank, e) from e
    matched = match(ranks)
    for rank in ranks:
        _draw_steps(rank, write)
        _draw_collectives(rank, write)
    for number, parts in enumerate(matched):
        _draw_arrows(number, parts, write)
    return ranks


def document(file: TextIO) -> tuple[Write, Callable[[], object]]:
    """Begin a document of Chrome's trace format.

    Returns a function that writes an event into ``file``, and one that ends the document.
    """
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    # Perfetto does not decode escapes such as "\\u00b7" in names of processes.
    encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, ensure_ascii=False).encode
    separator = [""]

    def write(event: dict[str, Any]) -> None:
        file.write(separator[0] + encode(event))
        separator[0] = ",\n"

    return write, lambda: file.write("\n]}\n")


def _copy(events: Iterable[dict[str, Any]], rank: RankTrace, process: int, write: Write) -> None:
    """Write a rank's events except its collectives, and add the data for `figures` to ``rank``."""
    threads: dict[Any, int] = {}
    spans, append = rank.spans, rank.spans.append
    for event in events:
        phase, name = event["ph"], event.get("name", "")
        if phase == "M":
            if name == "thread_name" and event["tid"] not in threads:
                event.update(pid=process, tid=_thread(rank.rank, threads, event["tid"]))
                write({key: event[key] for key in ("ph", "name", "pid", "tid", "args")})
            continue
        if event["ts"] < rank.begin:
            continue  # of the step before the trace
        arguments = event.get("args", {})
        for hidden in _HIDDEN:
            arguments.pop(hidden, None)
        if phase != "X":
            event["id"] = rank.rank * _PER_RANK + event["id"]
        elif found := COLLECTIVE.fullmatch(name):
            begin, end = event["ts"], event["ts"] + event["dur"]
            rank.collectives.append(Collective(found[1], found[2], begin, end, arguments))
            continue
        event["pid"], event["tid"] = process, _thread(rank.rank, threads, event["tid"])
        write(event)
        if phase == "X":
            span = Span(name, event["tid"], event["ts"], event["ts"] + event["dur"])
            if name.startswith(LOADER):
                rank.input.append(span)
            elif name.startswith(OPTIMIZER):
                rank.optimizer.append(span)
            elif event.get("cat") == "cpu_op":
                append(span)
    spans.sort(key=lambda span: span.begin)


def _process(rank: int, name: str, write: Write) -> int:
    """Write a rank's process, and return its number, which is not 0: Perfetto's idle process."""
    process = rank + 1
    write({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
    write({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": rank}})
    return process


def _thread(rank: int, threads: dict[Any, int], thread: Any) -> int:
    return threads.setdefault(thread, (rank + 1) * _PER_RANK + len(threads) + 2)


def _row(rank: int, number: int, name: str, index: int, write: Write) -> int:
    thread = (rank + 1) * _PER_RANK + number
    for what, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": index})):
        write({"ph": "M", "name": what, "pid": rank + 1, "tid": thread, "args": args})
    return thread


def _draw_steps(rank: RankTrace, write: Write) -> None:
    row = _row(rank.rank, 1, "steps", -2, write)
    # Whole nanoseconds, so that a step doesn't end after the next one has begun.
    steps = [(number, round(at, 3)) for number, at in rank.steps]
    for (_, begin), (number, end) in pairwise(steps):
        write(
            {
                "ph": "X", "cat": "step", "name": f"step {number}", "pid": rank.rank + 1, "tid": row,
                "ts": begin, "dur": round(end - begin, 3),
            }
        )  # fmt: skip


def _draw_collectives(rank: RankTrace, write: Write) -> None:
    """Write a rank's collectives, in several rows if they overlap, as events in a row can't overlap."""
    free: list[float] = []
    for each in sorted(rank.collectives, key=lambda each: each.begin):
        lane = next((number for number, until in enumerate(free) if until <= each.begin), len(free))
        if lane == len(free):
            free.append(0.0)
            _row(rank.rank, _LANES + lane, "collectives", -1, write)
        free[lane] = each.end
        each.place = (rank.rank + 1) * _PER_RANK + _LANES + lane
        args = dict(each.args)
        if each.key:
            args.update(group=each.key[1], number=each.key[2])
        if each.last is not None and each.last_rank != rank.rank:
            waited = max(0.0, min(each.last, each.end) - each.begin) / 1e3
            args.update({"waited for rank": each.last_rank, "waited (ms)": round(waited, 3)})
        write(
            {
                "ph": "X", "cat": "collective", "name": f"{each.backend}:{each.kind}", "pid": rank.rank + 1,
                "tid": each.place, "ts": round(each.begin, 3), "dur": round(each.end - each.begin, 3),
                "args": args,
            }
        )  # fmt: skip


def _draw_arrows(number: int, parts: Sequence[tuple[RankTrace, Collective]], write: Write) -> None:
    """Write arrows between the parts of a collective, from the first rank to begin it to the last."""
    for place, (rank, part) in enumerate(parts):
        phase = "s" if place == 0 else "f" if place == len(parts) - 1 else "t"
        event = {
            "ph": phase, "cat": "collective", "name": part.kind, "id": number, "pid": rank.rank + 1,
            "tid": part.place, "ts": round(part.begin, 3),
        }  # fmt: skip
        write(event if phase == "s" else {**event, "bp": "e"})
