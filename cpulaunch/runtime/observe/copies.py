"""A warning, or an error with ``--strict``, if the ranks train separate models."""

from __future__ import annotations

import os
import sys
from typing import Any

from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.settings import Table
from cpulaunch.errors import UsageError
from cpulaunch.runtime.log import log_once


def warn_of_separate_copies(torch: Any) -> None:
    """Warn if there is no process group at the first optimizer step.  Raises UsageError with ``--strict``."""
    ranks, on_host = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks == "1":
        return
    if not torch.distributed.is_initialized():
        what = (
            f"there is no process group: the ranks train by themselves, so they train {ranks} separate "
            "models, and write the same files"
        )
        remedy = (
            "to train one model, use DistributedDataParallel, cpulaunch.prepare, Accelerator(cpu=True) or "
            f"Lightning's Trainer(strategy='ddp', devices={on_host})"
        )
    elif _accelerate_is_alone():
        what = (
            f"accelerate runs in each of the {ranks} ranks by itself, so they train {ranks} separate models"
        )
        remedy = "Accelerator(cpu=True), or no --as-written, trains one"
    else:
        return
    if rank_setting(Table.training.strict, os.environ):
        raise UsageError(f"{_calling_line()}: at the first optimizer step, {what}", hint=remedy)
    log_once(f"warning: {what}; {remedy}")


def _calling_line() -> str:
    """Return ``file:line`` of the innermost call outside of torch and cpulaunch."""
    frame = sys._getframe()
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "cpulaunch") and frame.f_back:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _accelerate_is_alone() -> bool:
    """Return whether accelerate trains with one process, in which case it ignores the process group."""
    kind = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return getattr(kind, "_shared_state", {}).get("num_processes") == 1
