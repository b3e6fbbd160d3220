"""Reading small files of sysfs and procfs; functions that take a `Read` can be given recorded files."""

from __future__ import annotations

from collections.abc import Callable

Read = Callable[[str], str | None]
"""Gives the text of the file at an absolute path, or None where there is no such file."""


def read_file(path: str) -> str | None:
    """The text of a file of sysfs or procfs; None where there is none, or it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    except OSError:
        return None
