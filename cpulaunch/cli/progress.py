"""Shows the progress of long operations: builds, and queries of many hosts."""

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
    from cpulaunch.discovery.probe.probe import ProbeProgress

FIRST_LINE = 5.0
"""Without a terminal: seconds until the first line; the interval doubles for each further line."""


class BuildProgress:
    """Shows the progress of building ``what``: on a terminal in its last line, else with a line per step."""

    def __init__(self, what: str = "ccl") -> None:
        self._what = what
        self._on_terminal = has_last_line()
        self._drawn = self._said = False
        self._began = time.monotonic()

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._drawn:
            with contextlib.suppress(OSError, ValueError):
                print(file=sys.stderr, flush=True)
        if kind is KeyboardInterrupt:
            say(f"{self._what}: interrupted; the next build reuses the compiled files")

    def __call__(self, step: str, detail: str) -> None:
        """Show a step and its detail."""
        if self._on_terminal:
            self._drawn = True
            seconds = f"{time.monotonic() - self._began:.0f} s"
            _draw(f"cpulaunch: {self._what}, once: {f'{step}, {detail}' if detail else step} ({seconds})")
        elif not detail:
            say(f"{self._what}: {step}" + ("" if self._said else " (building it takes up to a minute, once)"))
            self._said = True


class AskingProgress:
    """Shows how many hosts have answered: on a terminal in its last line, else in occasional lines.

    ``meanwhile``: called in a thread when the first hosts have been asked.
    """

    def __init__(self, meanwhile: Callable[[], object] | None = None) -> None:
        self._meanwhile, self._started = meanwhile, False
        self._on_terminal = has_last_line()
        self._drawn = False
        self._began, self._next_line = time.monotonic(), FIRST_LINE

    def __call__(self, asked: ProbeProgress | None) -> None:
        """Show progress; None at the end.  The first call shows nothing, as answers usually come at once."""
        if not self._started:
            self._started = True
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
    """Overwrite the terminal's last line."""
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print(f"\r\x1b[K{line[: width()]}", end="", file=sys.stderr, flush=True)
