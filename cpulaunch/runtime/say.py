"""Lines of ours on stderr: few, and each only once."""

from __future__ import annotations

import os
import sys

_said: set[str] = set()


def say(text: str, *, every_rank: bool = False) -> None:
    """Print ``cpulaunch: text`` once, on rank 0 (or on every rank)."""
    if text in _said or not (every_rank or os.environ.get("RANK", "0") == "0"):
        return
    _said.add(text)
    print(f"cpulaunch: {text}", file=sys.stderr, flush=True)
