"""Warns if each rank creates a process group of its own, so that the ranks train separate models.

This happens if the script starts processes (``torch.multiprocessing.spawn``, torchrun, accelerate's
``notebook_launcher``), or takes its rank from the variables of an MPI that didn't start it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any

from cpulaunch import variables
from cpulaunch.runtime.hooks import Change, bound_arguments, replace_everywhere
from cpulaunch.runtime.log import log_once

_WANTS_MPI = (
    "; a script that takes its rank from a variable such as PMI_RANK needs that MPI: --launcher mpirun"
)


def _warn_of_own_launcher(api: Any, _: object) -> None:
    """Warn if each rank calls ``torch.distributed.launcher.api.launch_agent``."""
    original = api.launch_agent

    @functools.wraps(original)
    def launch_agent(config: Any, *args: Any, **kwargs: Any) -> Any:
        if ranks := _other_ranks(os.environ):
            _warn(ranks, f"starts {config.nproc_per_node} processes of its own")
            del os.environ[variables.JOB_RANK]  # so that the processes don't warn again
        return original(config, *args, **kwargs)

    api.launch_agent = launch_agent


def _warn_of_own_groups(torch: Any, _: object) -> None:
    """Warn if ``init_process_group`` creates a group that is not the job's."""
    original = torch.distributed.distributed_c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = bound_arguments(signature, args, kwargs) or {}
        ranks = _other_ranks(os.environ)
        if ranks and (size := _own_group(given, os.environ)):
            more = "" if size > 1 else _WANTS_MPI
            _warn(ranks, f"makes a process group of {size} of its own", more)
        return original(*args, **kwargs)

    replace_everywhere(original, init_process_group)


def _warn(ranks: int, what: str, more: str = "") -> None:
    log_once(
        f"warning: each of the job's {ranks} ranks {what}, so {ranks} separate models are trained; "
        f"start the script with -n 1, or have `cpulaunch run` start all of its processes{more}",
        every_rank=True,
    )


def _other_ranks(environ: Mapping[str, str]) -> int:
    """Return the job's number of ranks; 0 if it is 1, or if this is neither rank 0 nor its child process."""
    rank, _, size = environ.get(variables.JOB_RANK, "").partition("/")
    return int(size) if rank == "0" and size != "1" else 0


def _own_group(given: Mapping[str, Any], environ: Mapping[str, str]) -> int | None:
    """Return the size of the group to create if this process is its last rank; else None.

    Rank 0 is never the last rank of the job's group, so if it is a group's last rank, that isn't the job's.
    """
    rank, size = _number(given, environ, "rank"), _number(given, environ, "world_size")
    return size if rank is not None and size is not None and rank == size - 1 else None


def _number(given: Mapping[str, Any], environ: Mapping[str, str], name: str) -> int | None:
    """Return ``rank`` or ``world_size`` from arguments or environment; None if a store or URL defines it."""
    number = given.get(name, -1)
    if isinstance(number, int) and number >= 0:
        return number
    text = environ.get(name.upper(), "")
    by_environment = given.get("store") is None and given.get("init_method") in (None, "env://")
    return int(text) if by_environment and text.isdecimal() else None


_WITHOUT = "there is no warning if ranks start processes, and train separate models"

CHANGES = (
    Change(
        ("distributed.distributed_c10d.init_process_group",),
        (),
        "warns if the script makes its own process groups in each rank",
        _WITHOUT,
        _warn_of_own_groups,
    ),
)

OF_LAUNCHER = (
    Change(("launch_agent",), (), "warns if each rank starts torchrun", _WITHOUT, _warn_of_own_launcher),
)
