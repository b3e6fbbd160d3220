"""Ranks that train without a process group, and so train separate models: one line says so."""

from __future__ import annotations

import os
import sys
from typing import Any

from cpulaunch.runtime.log import log_once


def warn_of_separate_copies(torch: Any) -> None:
    """To be called at the first step of an optimizer."""
    ranks, on_host = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks == "1":
        return
    if not torch.distributed.is_initialized():
        log_once(
            f"warning: there is no process group: the ranks train by themselves, so they train {ranks} "
            "separate models, and write the same files; one model takes DistributedDataParallel, "
            "cpulaunch.prepare, Accelerator(cpu=True) or Lightning's Trainer(strategy='ddp', "
            f"devices={on_host})"
        )
    elif _accelerate_is_alone():
        log_once(
            f"warning: accelerate runs in each of the {ranks} ranks by itself, so they train {ranks} "
            "separate models; Accelerator(cpu=True), or no --as-written, trains one"
        )


def _accelerate_is_alone() -> bool:
    """Whether accelerate takes this rank for the only one: it makes a group then, and doesn't use it."""
    kind = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return getattr(kind, "_shared_state", {}).get("num_processes") == 1
