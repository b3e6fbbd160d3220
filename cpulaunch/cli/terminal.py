"""What the terminal can do."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import termios
import textwrap
from collections.abc import Mapping

WIDEST = 80
"""Text for people is never laid out wider than this."""


def is_interactive(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody sits there who can be asked: keys come from, and text goes to, a real terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty() and environ.get("TERM", "dumb") != "dumb"


def drop_keys() -> None:
    """Forget what was typed so far: nobody has seen yet what it would answer."""
    with contextlib.suppress(termios.error):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def has_unicode(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the locale says that the terminal shows more than ASCII."""
    named = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or "C"
    if named == "C.UTF-8" and not environ.get("LC_ALL"):
        # Python sets LC_CTYPE to this by itself where the locale is C (PEP 538).
        named = environ.get("LANG") or "C"
    return "utf8" in named.lower().replace("-", "")


def has_last_line(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether stderr is a terminal whose last line can be drawn over and over."""
    return sys.stderr is not None and sys.stderr.isatty() and environ.get("TERM") != "dumb"


def has_colour(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether stderr shows colours, and nobody asked for none (no-color.org)."""
    return sys.stderr.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def fold(line: str) -> str:
    """A line of prose in lines that fit the terminal, which keep its indentation and its newlines at the end.

    Texts of several lines, such as pictures and YAML, stay as they are.
    """
    prose = line.rstrip("\n")
    if len(prose) <= width() or "\n" in prose:
        return line
    indent = prose[: len(prose) - len(prose.lstrip())]
    folded = textwrap.fill(prose.strip(), width(), initial_indent=indent, subsequent_indent=indent + "  ")
    return folded + line[len(prose) :]


def width() -> int:
    """Columns to lay text out in."""
    return max(20, min(WIDEST, shutil.get_terminal_size().columns - 1))
