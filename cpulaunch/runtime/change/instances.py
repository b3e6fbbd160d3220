"""Process groups of instances (``--instances``), which are independent programs."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any

from cpulaunch.runtime.hooks import Change, bound_arguments, replace_everywhere
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings


def _make_groups_of_one(torch: Any, settings: TrainingSettings) -> None:
    """Make ``init_process_group`` create a group of one, unless the script defines the group's members."""
    original = torch.distributed.distributed_c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        arguments = bound_arguments(signature, args, kwargs)
        if arguments is None or _defines_members(arguments, os.environ):
            return original(*args, **kwargs)
        log_once(
            "instances are independent programs: the process group of each has no other member; "
            "-n N instead of --instances N starts the ranks of one job"
        )
        alone = {"backend": "gloo", "store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
        return original(**{**arguments, **alone, "init_method": None})

    replace_everywhere(original, init_process_group)


def _defines_members(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Return whether the script defines the members of the group."""
    by_argument = any(arguments.get(name, -1) not in (-1, None) for name in ("rank", "world_size", "store"))
    by_url = arguments.get("init_method") not in (None, "env://")
    return by_argument or by_url or {"RANK", "WORLD_SIZE"} <= environ.keys()


CHANGES = (
    Change(
        ("distributed.distributed_c10d.init_process_group",),
        ("distributed.HashStore",),
        "an instance (`--instances`) is alone in the group of all ranks",
        "a script that makes a process group needs RANK and WORLD_SIZE",
        _make_groups_of_one,
    ),
)
