"""Lines in a box, for people."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable

WIDEST = 120
"""Columns of the box; longer lines are folded."""


def box(title: str, lines: Iterable[str], color: str = "red") -> str:
    """``lines`` in a box with this title, of which what follows a colon may become the first line."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    terminal = sys.stderr is not None and sys.stderr.isatty()
    width = min(WIDEST, shutil.get_terminal_size().columns) if terminal else WIDEST
    if len(title) > width - 6:  # it would be cut off
        title, _, rest = title.partition(": ")
        lines = [rest, "", *lines]
    text = Text("\n".join(part for line in lines for part in _folded(_printable(line), width - 4)))
    panel = Panel.fit(
        text, title=Text(_printable(title), f"bold {color}"), title_align="left", border_style=color
    )
    console = Console(file=(box := io.StringIO()), force_terminal=terminal, width=width, highlight=False)
    console.print(panel)
    return box.getvalue()


def _folded(line: str, width: int) -> list[str]:
    """Between words, if that leaves at least two thirds of the width; wherever it ends in a long path."""
    parts = []
    while len(line) > width:
        blank = line.rfind(" ", width * 2 // 3, width + 1)
        end = width if blank < 0 else blank
        parts.append(line[:end])
        line = line[end:] if blank < 0 else line[end + 1 :]
    return [*parts, line]


def _printable(line: str) -> str:
    """Without what would move a terminal's cursor."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "?" for c in line.expandtabs(4))
