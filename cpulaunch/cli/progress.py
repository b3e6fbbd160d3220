"""Says how far something is that takes long: building the ccl group or the kernels, asking many hosts."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cpulaunch.cli.main import say
from cpulaunch.cli.terminal import has_last_line, width

if TYPE_CHECKING:
    from cpulaunch.discovery.probe.probe import Asked

FIRST_LINE = 5.0
"""Seconds until the first line on hosts without a terminal; each next one comes after twice as long."""


class BuildProgress:
    """In the terminal's last line, which stays when the context is left, else in a line for each step.

    ``what`` is built.
    """

    def __init__(self, what: str = "ccl") -> None:
        self._what = what
        self._on_terminal = has_last_line()
        self._drawn = self._said = False
        self._began = time.monotonic()

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            with contextlib.suppress(OSError, ValueError):
                print(file=sys.stderr, flush=True)

    def __call__(self, step: str, detail: str) -> None:
        """Show a step, and how far it is."""
        if self._on_terminal:
            self._drawn = True
            seconds = f"{time.monotonic() - self._began:.0f} s"
            _draw(f"cpulaunch: {self._what}, once: {f'{step}, {detail}' if detail else step} ({seconds})")
        elif not detail:
            say(f"{self._what}: {step}" + ("" if self._said else " (building it takes half a minute, once)"))
            self._said = True


class AskingProgress:
    """In the terminal's last line, else in a line now and then.

    ``meanwhile`` is called by a thread once the hosts are being asked, when there is nothing else to do.
    """

    def __init__(self, meanwhile: Callable[[], object] | None = None) -> None:
        self._meanwhile, self._told = meanwhile, False
        self._on_terminal = has_last_line()
        self._drawn = False
        self._began, self._next_line = time.monotonic(), FIRST_LINE

    def __call__(self, asked: Asked | None) -> None:
        """How far it is; None where it is done.  The start, which may well be the end soon, isn't shown."""
        if not self._told:
            self._told = True
            if self._meanwhile:
                threading.Thread(target=self._meanwhile, daemon=True).start()
            return
        if asked is None:
            if self._drawn:
                _draw("")
            return
        failed = f", {asked.failed:,} failed" if asked.failed else ""
        line = f"asking hosts: {asked.answered:,} of {asked.hosts:,} answered{failed}"
        if self._on_terminal:
            self._drawn = True
            _draw(f"cpulaunch: {line}")
        elif time.monotonic() >= self._began + self._next_line:
            self._next_line *= 2
            say(line)


def _draw(line: str) -> None:
    """Write over the terminal's last line."""
    with contextlib.suppress(OSError, ValueError):  # nobody sees it any more
        print(f"\r\x1b[K{line[: width()]}", end="", file=sys.stderr, flush=True)
