"""Texts about a stall: a box for the terminal, and the file with all stacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cpulaunch.model.names import Names
from cpulaunch.supervise.control.observer_messages import RankStacks
from cpulaunch.supervise.job.events import ReportStall
from cpulaunch.supervise.output.box import box
from cpulaunch.supervise.stalls import stacks
from cpulaunch.supervise.stalls.waiting import waits
from cpulaunch.wording import shown_path

MAX_WHERE = 12
"""Maximum lines of the list of the ranks' places."""


def stall_box(report: ReportStall, file: Path, names: Names) -> str:
    """Return the box.  ``file`` is the file with all stacks."""
    return box(title(report), list(_lines(report, file, names)), "yellow")


def stall_line(report: ReportStall, file: Path) -> str:
    return f"cpulaunch: {title(report)}; stacks: {shown_path(file)}\n"


def title(report: ReportStall) -> str:
    """Return the duration of the stall and its explanation, in one line."""
    before = "" if report.begun else ", before the first step"
    return f"no progress for {report.stall.seconds:.0f} s{before}: {report.explanation.headline}"


def stacks_text(report: ReportStall, names: Names) -> str:
    """Return the explanation and all stacks, for the file."""
    rank_stacks = stacks.report(_rank_stacks(report, names))
    return "\n".join([title(report), *_story(report), "", rank_stacks])


def _story(report: ReportStall) -> list[str]:
    """Return the lines after the title.  Empty if the title is the whole explanation."""
    found = report.explanation
    lines = found.lines[1:] if found.lines[:1] == (found.headline,) else found.lines
    return [*lines, *([found.advice] if found.advice else [])]


def _lines(report: ReportStall, file: Path, names: Names) -> Iterator[str]:
    story = _story(report)
    yield from [*story, ""] if story else ()
    rank_stacks = _rank_stacks(report, names)
    where = list(stacks.place_lines(rank_stacks, dict(_called(report, names))))
    yield from ("Who is where:", *where[:MAX_WHERE])
    if len(where) > MAX_WHERE:
        yield f"… {len(where) - MAX_WHERE} more"
    yield from ("", *stacks.missing_frames(rank_stacks), f"stacks: {shown_path(file)}")


def _called(report: ReportStall, names: Names) -> Iterator[tuple[int, str]]:
    """Yield the number of each rank that waits, and the operation that its ledger shows."""
    groups = {each.rank: each.dump.groups for each in report.snapshots if each.dump}
    for wait in waits(groups, len(report.snapshots)):
        yield from ((names.number(rank), wait.operations[rank].kind) for rank in wait.waiting)


def _rank_stacks(report: ReportStall, names: Names) -> list[RankStacks]:
    """Return the stacks of each rank, with the numbers that users give to ranks or instances."""
    return [
        RankStacks(
            names.number(each.rank),
            each.host,
            each.dump and each.dump.processes,
            each.dump.error if each.dump else "its agent has not answered",
            each.left,
        )
        for each in report.snapshots
    ]
