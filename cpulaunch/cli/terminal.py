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
"""Maximum width of text, in columns."""


def why_not_interactive(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why questions can't be asked on stdin and stderr; None if they can."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "stdin or stderr is no terminal"
    term = environ.get("TERM")
    return f"$TERM is {term or 'not set'}" if term in (None, "", "dumb") else None


def drop_keys() -> None:
    """Discard pending keys, which were typed before the question was shown."""
    with contextlib.suppress(termios.error):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def has_unicode(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the locale's encoding is UTF-8."""
    named = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or "C"
    if named == "C.UTF-8" and not environ.get("LC_ALL"):
        # Python itself sets LC_CTYPE to this if the locale is C (PEP 538).
        named = environ.get("LANG") or "C"
    return "utf8" in named.lower().replace("-", "")


def has_last_line(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether stderr is a terminal whose last line can be overwritten."""
    return sys.stderr is not None and sys.stderr.isatty() and environ.get("TERM") != "dumb"


def has_colour(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether stderr is a terminal with colours, and NO_COLOR is not set."""
    return sys.stderr.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def fold(line: str) -> str:
    """Wrap a line of prose at the terminal's width, with its indentation and trailing newlines.

    A text of several lines, such as YAML, is returned unchanged.
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
