"""Computes the figures in the summary of several ranks' traces."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cpulaunch.trace.intervals import Intervals, intersect, subtract, total, union
from cpulaunch.trace.model import RankTrace, Span

TOP = 10
"""Number of listed operations."""

_NO_COMPUTATION = re.compile(
    r"c10d::|_c10d_functional::|autograd::engine::|torch::autograd::|profiler::|(?!CompiledFunction)\w*Backward\d*$"
)
"""Matches operations that only call others, or the process group."""

_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")

PARTS = ("computation", "optimizer", "input", "communication", "waiting", "other")
"""Parts of a rank's time, which add up to the whole.

``waiting`` and ``communication`` are times of collectives that don't overlap with computation: ``waiting``
before the last rank begins a collective, ``communication`` after that.  ``other`` is Python and idle time.
"""


class Shares(NamedTuple):
    """The parts of a rank's time, as shares between 0 and 1.

    ``hidden`` is the time of collectives that overlap with the first three of `PARTS`.
    """

    rank: int
    host: str
    seconds_per_step: float
    computation: float
    optimizer: float
    input: float
    communication: float
    waiting: float
    other: float
    hidden: float


class Operation(NamedTuple):
    """An operation's own time, without the operations that it calls."""

    name: str
    seconds: float  # per step and rank
    share: float  # of a step's time
    calls: float  # per step and rank


class Figures(NamedTuple):
    """The figures of a trace."""

    first: int  # the first traced step
    last: int  # the last traced step
    ranks: list[Shares]
    operations: list[Operation]
    waited_for: tuple[int, float] | None  # rank for which others waited most, its share of all waiting
    imbalance: float  # longest computation of a rank ÷ mean of all ranks
    sources: list[str]  # torch's names of the ranks' data loaders
    backends: list[str]  # of the ranks' collectives
    threads: int  # maximum of a rank
    migrations: float  # of threads, per rank and second
    throttled: tuple[int, float]  # rank that lost most time to a CPU quota, share of its time
    far_memory: tuple[int, float]  # rank with most memory on other NUMA nodes, share of its memory
    uncertain: float  # maximum error of the ranks' clocks in seconds
    joined: int  # number of collectives that were matched between ranks
    alone: int  # number of ranks' collectives that were not matched
    noun: str  # rank or instance


def figures(ranks: Sequence[RankTrace], noun: str = "rank") -> Figures:
    """Compute the figures of at least one traced rank."""
    shares = [_shares(rank) for rank in ranks]
    computing = [each.computation * each.seconds_per_step for each in shares]
    mean = sum(computing) / len(computing)
    seconds = sum((rank.end - rank.begin) / 1e6 for rank in ranks)
    parts = [each for rank in ranks for each in rank.collectives]
    joined = {each.key for each in parts if each.last is not None}
    return Figures(
        min(rank.steps[0][0] + 1 for rank in ranks),
        max(rank.steps[-1][0] for rank in ranks),
        shares,
        _operations(ranks)[:TOP],
        _waited_for(ranks),
        max(computing) / mean if mean else 1.0,
        sorted({span.name.partition("#")[2] for rank in ranks for span in rank.input}),
        sorted({each.backend for each in parts}),
        max(rank.threads for rank in ranks),
        sum(rank.migrations for rank in ranks) / seconds if seconds else 0.0,
        max(((rank.rank, rank.throttled) for rank in ranks), key=lambda each: each[1]),
        max(((rank.rank, rank.far_memory or 0.0) for rank in ranks), key=lambda each: each[1]),
        max(rank.uncertain for rank in ranks) / 1e6,
        len(joined),
        sum(each.last is None for each in parts),
        noun,
    )


def as_json(found: Figures) -> dict[str, Any]:
    """Return the figures as a JSON object."""
    return {
        **found._asdict(),
        "ranks": [each._asdict() for each in found.ranks],
        "operations": [each._asdict() for each in found.operations],
    }


def is_computation(name: str) -> bool:
    """Return whether an operation computes something itself."""
    if name.startswith(_COMPILED):
        return True
    return "::" in name and not _NO_COMPUTATION.match(name)


def _shares(rank: RankTrace) -> Shares:
    whole: Intervals = [(rank.begin, rank.end)]

    def within(spans: Iterable[Span]) -> Intervals:
        return intersect(union((span.begin, span.end) for span in spans), whole)

    reading = within(rank.input)
    optimizing = subtract(within(rank.optimizer), reading)
    busy = union([*reading, *optimizing])
    computing = subtract(within(span for span in rank.spans if is_computation(span.name)), busy)
    busy = union([*busy, *computing])
    under_way = intersect(union((each.begin, each.end) for each in rank.collectives), whole)
    exposed = subtract(under_way, busy)
    late = union((each.begin, min(each.last, each.end)) for each in rank.collectives if each.last is not None)
    waiting = total(intersect(exposed, late))
    all_of_it = rank.end - rank.begin or 1.0
    parts = (
        total(computing), total(optimizing), total(reading), total(exposed) - waiting, waiting,
        all_of_it - total(busy) - total(exposed), total(under_way) - total(exposed),
    )  # fmt: skip
    per_step = all_of_it / 1e6 / max(1, rank.count)
    return Shares(rank.rank, rank.host, per_step, *(part / all_of_it for part in parts))


def _operations(ranks: Sequence[RankTrace]) -> list[Operation]:
    """Return all operations, ordered by their own time, the longest first."""
    own: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for rank in ranks:
        threads: defaultdict[int, list[Span]] = defaultdict(list)
        for span in rank.spans:
            if rank.begin <= span.begin < rank.end:
                threads[span.thread].append(span)
        for spans in threads.values():
            _add_own_times(spans, own, calls)
    steps = sum(rank.count for rank in ranks) or 1
    time = sum(rank.end - rank.begin for rank in ranks) or 1.0
    found = [
        Operation(name, spent / 1e6 / steps, spent / time, calls[name] / steps)
        for name, spent in own.items()
        if not name.startswith("c10d::")
    ]
    return sorted(found, key=lambda each: -each.seconds)


def _add_own_times(spans: list[Span], own: defaultdict[str, float], calls: Counter[str]) -> None:
    spans.sort(key=lambda span: (span.begin, -span.end))
    around: list[Span] = []
    for span in spans:
        while around and around[-1].end <= span.begin:
            around.pop()
        if around:
            own[around[-1].name] -= min(span.end, around[-1].end) - span.begin
        own[span.name] += span.end - span.begin
        calls[span.name] += 1
        around.append(span)


def _waited_for(ranks: Sequence[RankTrace]) -> tuple[int, float] | None:
    """Return the rank for which others have waited most, and its share of all waiting."""
    waits: defaultdict[int, float] = defaultdict(float)
    for rank in ranks:
        for each in rank.collectives:
            if each.last is not None and each.last_rank is not None and each.last_rank != rank.rank:
                waits[each.last_rank] += max(0.0, min(each.last, each.end) - each.begin)
    if not (all_of_it := sum(waits.values())):
        return None
    most = max(waits, key=lambda number: waits[number])
    return most, waits[most] / all_of_it
