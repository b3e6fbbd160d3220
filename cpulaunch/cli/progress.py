"""Says how far asking many hosts is."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from cpulaunch.cli.main import say
from cpulaunch.cli.terminal import has_last_line, width

if TYPE_CHECKING:
    from cpulaunch.discovery.probe import Asked

FIRST_LINE = 5.0
"""Seconds until the first line where stderr is no terminal; each next one comes after twice as long."""

_CLEAR = "\r\x1b[K"


class Progress:
    """In the terminal's last line, else in a line now and then."""

    def __init__(self) -> None:
        self._on_terminal = has_last_line()
        self._drawn = False
        self._began, self._next_line = time.monotonic(), FIRST_LINE

    def show(self, asked: Asked | None) -> None:
        """How far it is; None where it is done."""
        if asked is None:
            if self._drawn:
                self._draw("")
            return
        failed = f", {asked.failed:,} failed" if asked.failed else ""
        line = f"asking hosts: {asked.answered:,} of {asked.hosts:,} answered{failed}"
        if self._on_terminal:
            self._drawn = True
            self._draw(f"cpulaunch: {line}")
        elif time.monotonic() >= self._began + self._next_line:
            self._next_line *= 2
            say(line)

    def _draw(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody sees it any more
            print(f"{_CLEAR}{line[: width()]}", end="", file=sys.stderr, flush=True)
