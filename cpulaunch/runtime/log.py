"""What the runtime tells people, on stderr: few lines, and each of them once in a process."""

from __future__ import annotations

import os
import sys

_logged: set[str] = set()


def log_once(text: str, *, every_rank: bool = False) -> None:
    """Print ``cpulaunch: text`` on rank 0 (or on every rank), unless this process has printed it before."""
    if text in _logged or not (every_rank or os.environ.get("RANK", "0") == "0"):
        return
    _logged.add(text)
    print(f"cpulaunch: {text}", file=sys.stderr, flush=True)
