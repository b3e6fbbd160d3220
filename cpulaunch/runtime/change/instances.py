"""Process groups of instances: each instance is an independent program with a group of its own."""

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
    """Make a group of one when a script makes the group of all ranks, and log that once."""
    original = torch.distributed.distributed_c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = bound_arguments(signature, args, kwargs)
        if given is None or _is_the_scripts_own(given, os.environ):
            return original(*args, **kwargs)
        log_once(
            "instances are independent programs: the process group of each has no other member; "
            "-n N in place of --instances N starts the ranks of one job"
        )
        alone = {"backend": "gloo", "store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
        return original(**{**given, **alone, "init_method": None})

    replace_everywhere(original, init_process_group)


def _is_the_scripts_own(given: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Return whether the script itself defines who is in the group."""
    by_argument = any(given.get(name, -1) not in (-1, None) for name in ("rank", "world_size", "store"))
    by_url = given.get("init_method") not in (None, "env://")
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
