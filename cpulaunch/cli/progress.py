"""The progress of a build of the ccl group, for people."""

from __future__ import annotations

import sys
import time

from cpulaunch.ccl.build import LINKING
from cpulaunch.cli.main import say


class Progress:
    """What is being done: one line that is written over on a terminal, else a line for each step."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, step: str, detail: str) -> None:
        """Show a step, and how far it is."""
        if sys.stderr.isatty():
            seconds = f"{time.monotonic() - self._began:.0f} s"
            line = f"ccl: {f'{step}, {detail}' if detail else step} ({seconds})"
            print(
                f"\r\x1b[Kcpulaunch: {line}",
                end="\n" if detail == LINKING else "",
                file=sys.stderr,
                flush=True,
            )
        elif not detail:
            say(f"ccl: {step}")
