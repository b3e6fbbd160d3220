"""How a job failed, for people: the first failure in a box, then a line on the others."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from cpulaunch.model.cores import CoreSet
from cpulaunch.supervise.directory import JobDirectory
from cpulaunch.supervise.outcome import INTERRUPTED, NODE_LOST, START_FAILED, Failure, Outcome, signal_name

MEANING = {
    4: "illegal instruction: built for another CPU?",
    6: "aborted: a library gave up",
    7: "bus error: /dev/shm full?",
    8: "arithmetic error",
    9: "killed",
    11: "invalid memory access",
    15: "ended by another program or the batch system",
}
TITLES = {
    NODE_LOST: "host {0.host} was lost",
    START_FAILED: "rank {0.rank} on {0.host} was not started",
}
FATAL = "Fatal Python error: "
"""How faulthandler's report begins."""

OURS = "cpulaunch/agent/"
"""Where the frames of ours are that run the user's program."""

MAX_LINES = 40
"""Lines of a traceback in the box; the log has all."""

WIDEST = 120
"""Columns of the box; longer lines are folded."""

LAST_LINES = 8
"""Lines of its log that are shown of a rank that gave no reason."""

TAIL = 64 << 10
"""Bytes of a log in which those are looked for."""


def failure_report(outcome: Outcome, directory: JobDirectory | None) -> str:
    """What to show of a job that didn't end well.  ``directory`` has its logs, if they can be read."""
    failure = outcome.first_failure
    if failure is None or failure.rank is None:
        if outcome.kind == INTERRUPTED:
            return f"cpulaunch: interrupted after {outcome.seconds:.1f} s\n"
        return f"cpulaunch: the job ended with exit code {outcome.exit_code}\n"
    title = TITLES.get(outcome.kind, "rank {0.rank} on {0.host} failed first").format(failure)
    others = "; ".join(_others(outcome, failure.rank))
    return _box(title, list(_story(failure, directory))) + (f"cpulaunch: {others}\n" if others else "")


def _story(failure: Failure, directory: JobDirectory | None) -> Iterator[str]:
    log = f"rank-{failure.rank}.log"
    said = None if directory is None else _tail(directory, log)
    if failure.signal is not None:
        meaning = MEANING.get(failure.signal)
        yield signal_name(failure.signal) + (f" ({meaning})" if meaning else "")
    elif failure.error is None:
        yield f"exit code {failure.exit_code}"
    if failure.error:
        yield failure.error
    if failure.file:
        yield f"at {failure.file}:{failure.line}"
    if failure.note:
        yield failure.note
    if failure.traceback:
        lines = failure.traceback.rstrip().splitlines()
        if lines[-1] == failure.error:  # the box begins with it
            del lines[-1]
        if lines:
            yield ""
        yield from _shortened(lines)
    elif failure.error is None and (last := _last_words(said or "")):
        yield from ("", "Its last output:") if not last[0].startswith(FATAL) else ("",)
        yield from _shortened(last)
    if directory is not None and said is not None:
        yield ""
        code = f"exit code {failure.exit_code} · " if failure.error and failure.exit_code is not None else ""
        path = directory.path / log
        yield f"{code}log: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"


def _tail(directory: JobDirectory, log: str) -> str | None:
    """The end of a rank's log; None where it has none."""
    try:
        with open(directory.open(log, os.O_RDONLY | os.O_NONBLOCK), "rb") as f:
            f.seek(max(0, f.seek(0, 2) - TAIL))
            return f.read().decode(errors="replace")
    except OSError:
        return None


def _last_words(text: str) -> list[str]:
    """The report of a native crash, else the last lines that the rank said."""
    _, fatal, after = text.rpartition(FATAL)
    if fatal:
        lines = (fatal + after).partition("\n\nExtension modules: ")[0].rstrip().splitlines()
        while len(lines) > 1 and OURS in lines[-1]:
            del lines[-1]
        return lines
    return [line.rpartition("\r")[2] for line in text.rstrip().splitlines()[-LAST_LINES:]]


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= MAX_LINES:
        return lines
    head = MAX_LINES // 4
    tail = MAX_LINES - head - 1
    return [*lines[:head], f"… {len(lines) - head - tail} lines …", *lines[-tail:]]


def _others(outcome: Outcome, first: int) -> Iterator[str]:
    others = sorted((rank for rank in outcome.ranks if rank.rank != first), key=lambda r: r.status)
    for status, group in groupby(others, key=lambda r: r.status):
        ranks = CoreSet(rank.rank for rank in group)
        yield f"{len(ranks)} other rank{'s' if len(ranks) > 1 else ''} ({ranks}): {status}"


def _box(title: str, lines: list[str]) -> str:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    terminal = sys.stderr is not None and sys.stderr.isatty()
    width = min(WIDEST, shutil.get_terminal_size().columns) if terminal else WIDEST
    text = Text("\n".join(part for line in lines for part in _folded(_printable(line), width - 4)))
    panel = Panel.fit(text, title=Text(title, "bold red"), title_align="left", border_style="red")
    console = Console(file=(box := io.StringIO()), force_terminal=terminal, width=width, highlight=False)
    console.print(panel)
    return box.getvalue()


def _folded(line: str, width: int) -> list[str]:
    """Wherever the width ends, as most long lines are paths and have no blanks to fold at."""
    return [line[i : i + width] for i in range(0, max(1, len(line)), width)]


def _printable(line: str) -> str:
    """Without what would move a terminal's cursor."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "?" for c in line.expandtabs(4))
