"""Draw text in a box for the terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable

WIDEST = 120
"""Maximum width of the box in columns; longer lines are wrapped."""


def box(title: str, lines: Iterable[str], color: str = "red") -> str:
    """Return ``lines`` in a box with ``title``.

    If the title is too long for the box, the part after its first colon becomes the first line of the text.
    """
    from rich.box import ASCII, ROUNDED
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    terminal = sys.stderr is not None and sys.stderr.isatty()
    width = min(WIDEST, shutil.get_terminal_size().columns) if terminal else WIDEST
    if len(title) > width - 6:  # rich would cut it off
        title, _, rest = title.partition(": ")
        lines = [rest, "", *lines]
    text = Text("\n".join(part for line in lines for part in _folded(_printable(line), width - 4)))
    panel = Panel.fit(
        text,
        ROUNDED if _has_utf8() else ASCII,
        title=Text(_printable(title), f"bold {color}"),
        title_align="left",
        border_style=color,
    )
    console = Console(file=(box := io.StringIO()), force_terminal=terminal, width=width, highlight=False)
    console.print(panel)
    return box.getvalue()


def _has_utf8() -> bool:
    """Return whether stderr's encoding is UTF-8, or stderr is closed."""
    return sys.stderr is None or sys.stderr.encoding.lower().replace("-", "") == "utf8"


def _folded(line: str, width: int) -> list[str]:
    """Wrap a line at a space in the last third of the width, or else at the full width."""
    parts = []
    while len(line) > width:
        blank = line.rfind(" ", width * 2 // 3, width + 1)
        end = width if blank < 0 else blank
        parts.append(line[:end])
        line = line[end:] if blank < 0 else line[end + 1 :]
    return [*parts, line]


def _printable(line: str) -> str:
    """Expand tabs, and replace characters that could move a terminal's cursor by ``?``."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "?" for c in line.expandtabs(4))
