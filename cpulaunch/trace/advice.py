"""Derives advice from the figures of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cpulaunch.trace.figures import Figures, Shares
from cpulaunch.wording import EXPOSED, SLOWER_RANKS

NOTABLE = 0.05
"""Minimum share of the time for advice."""

MUCH = 0.15
"""Minimum share of the time for advice about parts that are hard to avoid."""

ALONE = 0.6
"""A rank is to blame if it causes at least this share of all waiting for slower ranks."""

MUCH_FAR = 0.2
"""Minimum share of a rank's memory on other NUMA nodes for advice."""

MIGRATIONS = 10.0
"""Minimum migrations of a rank's threads per second for advice.  Pinned threads don't migrate."""

WORDS = {
    "computation": "computes",
    "optimizer": "is in its optimizer",
    "input": "waits for its input",
    "communication": "communicates",
    "other": "is in Python, or idle,",
}


class Advice(NamedTuple):
    """The share of time or memory that the advice concerns, and its text."""

    share: float
    text: str


def advice(found: Figures) -> list[Advice]:
    """Return advice about external causes, which often explain other advice, then other advice by cost."""
    rules = (_waiting, _input, _communication, _operations, _optimizer, _other, _migrations)
    inside = sorted((each for rule in rules for each in rule(found)), key=lambda each: -each.share)
    return [*_outside(found), *inside]


def mean(ranks: Sequence[Shares], part: str) -> float:
    """Return the mean of a field of ``Shares`` over the ranks."""
    return sum(float(getattr(each, part)) for each in ranks) / len(ranks)


def usual(found: Figures, part: str) -> float:
    """Return the median of a field of ``Shares`` over the ranks."""
    return sorted(float(getattr(each, part)) for each in found.ranks)[(len(found.ranks) - 1) // 2]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _outside(found: Figures) -> Iterator[Advice]:
    hosts = {each.rank: each.host for each in found.ranks}
    rank, share = found.throttled
    if share >= NOTABLE:
        why = "is lost to the CPU quota of its control group: it is throttled"
        yield Advice(share, f"{percent(share)} of the time of {found.noun} {rank} on {hosts[rank]} {why}")
    rank, share = found.far_memory
    if share >= MUCH_FAR:
        why = "is on other NUMA nodes than its cores"
        yield Advice(share, f"{percent(share)} of the memory of {found.noun} {rank} on {hosts[rank]} {why}")


def _waiting(found: Figures) -> Iterator[Advice]:
    """Yield advice about waiting for slower ranks.

    The share is the mean of all ranks, without the slowest rank if it is to blame.
    """
    if not found.waited_for:
        return
    number, part = found.waited_for
    slow = next(each for each in found.ranks if each.rank == number)
    others = [each for each in found.ranks if each.rank != number]
    share = mean(found.ranks if part < ALONE else others, "waiting")
    if share < NOTABLE:
        return
    if part < ALONE:
        text = f"for the slowest, not always the same rank (rank {number} in {percent(part)} of it)"
        yield Advice(share, f"{percent(share)} waiting {text}: batches of unequal length, or busy hosts")
        return
    more = {name: _ms(slow, name) - sum(_ms(each, name) for each in others) / len(others) for name in WORDS}
    most = max(more, key=lambda name: more[name])
    theirs = sum(_ms(each, most) for each in others) / len(others)
    why = f"it {WORDS[most]} {_ms(slow, most):.1f} ms a step, the others {theirs:.1f} ms"
    why += f": {_why_it_waits(found)}" if most == "input" else ""
    text = f"{percent(share)} of the others' time {SLOWER_RANKS}"
    yield Advice(share, f"{text}: rank {number} on {slow.host}: {why}")


def _ms(rank: Shares, part: str) -> float:
    return float(getattr(rank, part)) * rank.seconds_per_step * 1e3


def _input(found: Figures) -> Iterator[Advice]:
    share = usual(found, "input")
    if share < NOTABLE:
        return
    yield Advice(share, f"{percent(share)} waiting for input: {_why_it_waits(found)}")


def _why_it_waits(found: Figures) -> str:
    if any("SingleProcess" in source for source in found.sources):
        return "set num_workers > 0: workers read ahead"
    return "the loader's workers don't keep up: more of them, or a cheaper __getitem__"


def _communication(found: Figures) -> Iterator[Advice]:
    share, hidden = usual(found, "communication"), usual(found, "hidden")
    if share < NOTABLE:
        return
    beside = f"{percent(hidden)} more is hidden by computation"
    if "gloo" in found.backends:
        do = "--backend ccl is faster"
    else:
        do = "larger batches or gradient accumulation"
        if len({each.host for each in found.ranks}) > 1:
            do += "; between hosts also --compress-gradients bf16"
    yield Advice(share, f"{percent(share)} in {EXPOSED} ({beside}): {do}")


def _operations(found: Figures) -> Iterator[Advice]:
    random = sum(
        each.share for each in found.operations if "dropout" in each.name or "bernoulli" in each.name
    )
    if random >= NOTABLE:
        yield Advice(random, f"dropout's random numbers take {percent(random)}: does the model need it?")
    copies = sum(each.share for each in found.operations if each.name in ("aten::copy_", "aten::_to_copy"))
    if copies >= 2 * NOTABLE:
        why = "casts between types, or tensors that are not contiguous"
        yield Advice(copies, f"copies take {percent(copies)}: {why}")


def _optimizer(found: Figures) -> Iterator[Advice]:
    share = usual(found, "optimizer")
    if share < MUCH:
        return
    fused = any("_fused_" in each.name for each in found.operations)
    do = "gradient accumulation makes fewer steps" if fused else "fused=True, where the optimizer has it"
    yield Advice(share, f"{percent(share)} in the optimizer: {do}")


def _other(found: Figures) -> Iterator[Advice]:
    share = usual(found, "other")
    if share >= MUCH:
        do = "fewer and larger operations, and less Python between them"
        see = "cpulaunch stacks shows whether Python stands still, and where"
        yield Advice(share, f"{percent(share)} in Python, or idle: {do}; {see}")


def _migrations(found: Figures) -> Iterator[Advice]:
    if found.migrations >= MIGRATIONS:
        why = "are they pinned? (cpulaunch topology)"
        yield Advice(0.0, f"threads migrate {found.migrations:.0f} times a second and {found.noun}: {why}")
