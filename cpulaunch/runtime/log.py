"""Messages of the runtime on stderr."""

from __future__ import annotations

import os
import sys

from cpulaunch import variables

_logged: set[str] = set()


def log_once(text: str, *, every_rank: bool = False) -> None:
    """Print ``cpulaunch: text`` once per process: on rank or instance 0, or on all if ``every_rank``."""
    if text in _logged or not (every_rank or _is_first()):
        return
    _logged.add(text)
    print(f"cpulaunch: {text}", file=sys.stderr, flush=True)


def _is_first() -> bool:
    """Return whether this is rank 0 of the job and, in a child of multiprocessing, of its process group."""
    if os.environ.get("RANK", os.environ.get(variables.INSTANCE, "0")) != "0":
        return False
    multiprocessing, c10d = map(sys.modules.get, ("multiprocessing", "torch.distributed.distributed_c10d"))
    if not multiprocessing or not c10d or multiprocessing.parent_process() is None:
        return True
    return not c10d.is_initialized() or c10d.get_rank() == 0
