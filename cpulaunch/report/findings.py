"""Findings about a job's performance, from its telemetry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cpulaunch.config.settings import Table
from cpulaunch.report.buckets import Floats
from cpulaunch.report.numbers import Numbers, milliseconds, of_and_others, size
from cpulaunch.wording import EXPOSED, INPUT, OFF_CPU, SLOWER_RANKS, counted

NOTABLE = 0.05
"""Minimum share of the time for a finding."""

OUTSIDE = (
    ("throttled", NOTABLE, "time", "is lost to the CPU quota of its control group: it is throttled"),
    ("far_memory", 0.2, "memory", "is on other NUMA nodes than its cores"),
)
"""External causes that slow down a rank: the share's name in telemetry.jsonl, its minimum for a finding, the
quantity that it is a share of, and the end of the finding's text."""


class Finding(NamedTuple):
    """A finding's text, and the share of time or memory that it concerns."""

    share: float
    text: str


def findings(numbers: Numbers) -> list[Finding]:
    """Return a job's findings: external causes, which often explain the others, then the others by cost."""
    shares = numbers.shares()
    inside = [
        *_slow_rank(numbers, shares.get(SLOWER_RANKS)),
        *_input(shares.get(INPUT)),
        *_communication(numbers, shares.get(EXPOSED)),
        *_off_cpu(shares.get(OFF_CPU)),
    ]
    return [*_outside(numbers), *sorted(inside, key=lambda each: -each.share)]


def in_words(numbers: Numbers) -> str:
    """Return a job's key figures and findings as text for a terminal."""
    found = list(numbers.key_figures())
    width = max(len(name) for name, *_ in found)
    figures = [f"  {name:{width}}  {text}" for name, text, _ in found]
    lines = [f"  {each.text}" for each in findings(numbers)]
    if not lines and numbers.job.buckets.last_step:
        lines = ["  nothing: most time is spent on computation; cpulaunch profile shows details"]
    stands_out = ["what stands out", *lines] if lines else []
    return "\n".join([f"{numbers.job.name} ({size(numbers.job)})", *figures, *stands_out])


def _outside(numbers: Numbers) -> Iterator[Finding]:
    """Yield a finding for each external cause: the rank with the largest share, and the number of others."""
    other = f"other {numbers.job.names.noun}"
    for name, limit, of, what in OUTSIDE:
        found = numbers.job.buckets.processes.mean(name)
        if not found or (share := max(found.values())) < limit:
            continue
        rank = max(found, key=found.__getitem__)
        others = sum(each >= limit for each in found.values()) - 1
        same = f"; the same of {counted(others, other)}" if others else ""
        yield Finding(share, f"{_percent(share)} of the {of} of {_named(numbers, rank)} {what}{same}")


def _slow_rank(numbers: Numbers, waiting: Floats | None) -> Iterator[Finding]:
    """Yield a finding about waiting for slower ranks.

    The share is the mean of all ranks, without the slowest rank if it is to blame.
    """
    if waiting is None:
        return
    rank = _rank_to_blame(numbers, waiting)
    share = float(np.mean(waiting if rank is None else np.delete(waiting, rank)))
    if share < NOTABLE:
        return
    if rank is None:
        why = "not always the same rank (batches of unequal length, or busy hosts)"
        yield Finding(share, f"{_percent(share)} waiting for slower ranks: {why}")
        return
    own, others = of_and_others(numbers.own_of_ranks, rank)
    read, others_read = of_and_others(numbers.input_of_ranks, rank)
    what = f"takes {milliseconds(own)} a step without waiting, the others {milliseconds(others)}"
    if read - others_read > (own - others) / 2:
        what = f"waits {milliseconds(read)} a step for its input, the others {milliseconds(others_read)}"
    text = f"{_percent(share)} of the others' time waiting for slower ranks"
    yield Finding(share, f"{text}: {_named(numbers, rank)} {what}")


def _rank_to_blame(numbers: Numbers, waiting: Floats) -> int | None:
    """Return the slowest rank if it causes at least half of the others' waiting, else None."""
    if numbers.slowest is None:
        return None
    rank, _ = numbers.slowest
    own, others = of_and_others(numbers.own_of_ranks, rank)
    step = numbers.sums("seconds").sum() / numbers.sums("steps").sum()
    return rank if own - others >= step * np.mean(np.delete(waiting, rank)) / 2 else None


def _input(share: Floats | None) -> Iterator[Finding]:
    """Yield a finding about input, from the median rank.

    A single rank that waits for its input appears in the finding about slower ranks.
    """
    if share is not None and (usual := _median(share)) >= NOTABLE:
        do = "more workers of the DataLoader (num_workers), or a cheaper __getitem__"
        yield Finding(usual, f"{_percent(usual)} waiting for input: {do}")


def _communication(numbers: Numbers, share: Floats | None) -> Iterator[Finding]:
    if share is not None and (mean := float(np.mean(share))) >= NOTABLE:
        do = "larger batches or gradient accumulation"
        if len({rank.host for rank in numbers.job.ranks}) > 1:
            do += "; between hosts also --compress-gradients bf16"
        do = "--backend ccl is faster" if numbers.job.setting(Table.training.backend) == "gloo" else do
        yield Finding(mean, f"{_percent(mean)} in {EXPOSED}: {do}")


def _off_cpu(share: Floats | None) -> Iterator[Finding]:
    """Yield a finding about time off the CPU, from the median rank."""
    if share is not None and (usual := _median(share)) >= NOTABLE:
        why = "the program sleeps, or waits for a disk, a network, another process or a free core"
        yield Finding(usual, f"{_percent(usual)} {OFF_CPU}: {why} (cpulaunch stacks)")


def _median(share: Floats) -> float:
    """Return the lower median: a share that a rank really has."""
    return float(np.sort(share)[(len(share) - 1) // 2])


def _named(numbers: Numbers, rank: int) -> str:
    host = next((each.host for each in numbers.job.ranks if each.rank == rank), "")
    name = numbers.job.names.one(rank)
    return f"{name} on {host}" if host else name


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
