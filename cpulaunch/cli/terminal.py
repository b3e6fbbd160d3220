"""The terminal's capabilities."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import termios
import textwrap
from collections.abc import Mapping

WIDEST = 80
"""Maximum columns of text for people."""


def is_interactive(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a user can be asked: keys come from, and text goes to, a real terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty() and environ.get("TERM", "dumb") != "dumb"


def drop_keys() -> None:
    """Discard keys typed so far, because the user hasn't seen the next question yet."""
    with contextlib.suppress(termios.error):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def has_unicode(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the locale says that the terminal shows more than ASCII."""
    named = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or "C"
    if named == "C.UTF-8" and not environ.get("LC_ALL"):
        # If the locale is C, Python itself sets LC_CTYPE to this (PEP 538).
        named = environ.get("LANG") or "C"
    return "utf8" in named.lower().replace("-", "")


def has_last_line(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether stderr is a terminal whose last line can be overwritten."""
    return sys.stderr is not None and sys.stderr.isatty() and environ.get("TERM") != "dumb"


def has_colour(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether stderr shows colours, and they aren't disabled (no-color.org)."""
    return sys.stderr.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def fold(line: str) -> str:
    """Wrap a line of prose to the terminal's width, keeping its indentation and trailing newlines.

    Texts of several lines, such as pictures and YAML, are returned unchanged.
    """
    prose = line.rstrip("\n")
    if len(prose) <= width() or "\n" in prose:
        return line
    indent = prose[: len(prose) - len(prose.lstrip())]
    folded = textwrap.fill(prose.strip(), width(), initial_indent=indent, subsequent_indent=indent + "  ")
    return folded + line[len(prose) :]


def width() -> int:
    """Return the columns available for text."""
    return max(20, min(WIDEST, shutil.get_terminal_size().columns - 1))
