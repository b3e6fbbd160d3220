"""Formats the summary of a trace as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cpulaunch.trace.advice import advice, mean, percent
from cpulaunch.trace.figures import PARTS, Figures, Shares
from cpulaunch.wording import COMPUTATION, EXPOSED, HIDDEN, INPUT, SLOWER_RANKS, counted

COLUMNS = 8
"""Maximum number of ranks with a column each.  With more, the table has the mean and the extremes."""

TITLES = {
    "computation": COMPUTATION,
    "optimizer": "optimizer",
    "input": INPUT,
    "communication": EXPOSED,
    "waiting": SLOWER_RANKS,
    "other": "Python, and idle",
    "hidden": HIDDEN,
}

MAX_NAME = 60
"""Maximum characters of an operation's name."""


class Summary(NamedTuple):
    """The summary of a trace."""

    brief: list[str]  # lines without the tables
    text: str


def summary(found: Figures, missing: Mapping[int, str]) -> Summary:
    """Return the summary.  ``missing``: rank → why it has no trace."""
    head = list(_head(found, missing))
    advised = [f"  {each.text}" for each in advice(found)]
    advised = advised or ["  nothing stands out: most time is spent on computation"]
    return Summary([*head, *advised], "\n".join([*head, "", *advised, "", *_tables(found)]) + "\n")


def _head(found: Figures, missing: Mapping[int, str]) -> Iterator[str]:
    step = 1e3 * mean(found.ranks, "seconds_per_step")
    steps = f"step {found.first}" if found.first == found.last else f"steps {found.first} to {found.last}"
    ranks = counted(len(found.ranks), found.noun)
    yield f"{steps} of {ranks}: {step:.1f} ms a step while tracing"
    for rank, why in sorted(missing.items()):
        yield f"{found.noun} {rank} is missing: {why}"


def _tables(found: Figures) -> Iterator[str]:
    noun = found.noun
    yield from _table(found.ranks, noun)
    yield ""
    yield f"operations that cost most (their own time in a step of one {noun})"
    for each in found.operations:
        spent = f"{1e3 * each.seconds:9.2f} ms {percent(each.share):>5}"
        yield f"  {spent}  {each.calls:6.0f} ×  {each.name[:MAX_NAME]}"
    if len(found.ranks) > 1:
        yield ""
        yield f"the slowest {noun} computes {found.imbalance:.2f} times as long as the {noun}s' mean"
        if found.joined or found.alone:
            apart = f"; {found.alone} others have an unknown group" if found.alone else ""
            yield f"{found.joined} collectives joined by arrows{apart}"
    if found.uncertain:
        yield f"clocks of hosts agree to {1e3 * found.uncertain:.2f} ms"


def _table(ranks: Sequence[Shares], noun: str) -> Iterator[str]:
    columns = {f"{noun} {each.rank}": each for each in ranks} if len(ranks) <= COLUMNS else {}
    heads = [*columns] or ["mean", "least", "most", f"of {noun}"]
    width = max(9, *(len(head) for head in heads))
    yield " " * 26 + "".join(f"{head:>{width + 2}}" for head in heads)
    if columns:
        hosts = [each.host[: width + 1] for each in columns.values()]
        yield " " * 26 + "".join(f"{host:>{width + 2}}" for host in hosts)
    for part in (*PARTS, "hidden"):
        if columns:
            cells = [percent(getattr(each, part)) for each in columns.values()]
        else:
            most = max(ranks, key=lambda each, part=part: getattr(each, part))  # type: ignore[misc]
            least = min(getattr(each, part) for each in ranks)
            cells = [
                percent(mean(ranks, part)), percent(least), percent(getattr(most, part)), str(most.rank)
            ]  # fmt: skip
        yield f"  {TITLES[part]:24}" + "".join(f"{cell:>{width + 2}}" for cell in cells)
