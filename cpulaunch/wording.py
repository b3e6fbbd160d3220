"""Phrases used in the messages of many modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from errno import EAGAIN
from pathlib import Path

COMPUTATION, INPUT, OFF_CPU = "computation", "waiting for input", "off the CPU"
EXPOSED, HIDDEN = "exposed communication", "hidden communication"
SLOWER_RANKS = "waiting for slower ranks"
"""The parts of a step's time, as reports and profiles call them."""

PORT_IS_TAKEN = (
    "another job may have it, or --port-range has too few ports; "
    "without --master-port and $MASTER_PORT, each takes a free one"
)
"""Hint for a MASTER_PORT that is in use."""


def cannot_run(program: str, error: OSError) -> str:
    """Return why ``program`` cannot be started."""
    limit = " (ulimit -u, or the control group, allows no more processes)" if error.errno == EAGAIN else ""
    return f"{program} can't be run: {error.strerror}{limit}"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun: ``"1 rank"``, ``"2 ranks"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Return ``"a, b and c"``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def shortened(names: Sequence[str]) -> str:
    """Return up to four of ``names``, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def shown_path(path: Path | str) -> str:
    """Return ``path``, relative to the working directory if it is inside."""
    path = Path(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def closest(word: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the element of ``valid`` closest to ``word``; None if all similarities are below ``cutoff``."""
    import difflib  # only errors need it, and the agent must start quickly

    return next(iter(difflib.get_close_matches(word, list(valid), n=1, cutoff=cutoff)), None)


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` if an element of ``valid`` is close to ``word``, else ``""``."""
    close = closest(word, valid)
    return f"; did you mean {close!r}?" if close else ""
