"""Read small files of sysfs and procfs.  Functions that take a `Read` also work with recorded files."""

from __future__ import annotations

from collections.abc import Callable

Read = Callable[[str], str | None]
"""Returns the text of the file at an absolute path, or None if it can't be read."""


def read_file(path: str) -> str | None:
    """Read a file of sysfs or procfs.  None if it doesn't exist or can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    except OSError:
        return None
