"""Process groups that are not the job's, and the making of all.

A script that starts its own processes (``torch.multiprocessing.spawn``, torchrun, accelerate's
``notebook_launcher``) does so in each rank, and each of them then trains a model of its own.  One that takes
its rank from an MPI's variables believes each rank to be alone where no MPI started it.  That is hardly what
was meant, so one line says it.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cpulaunch import variables
from cpulaunch.runtime.change.groups import arguments_given, replace_everywhere
from cpulaunch.runtime.log import log_once

_WANTS_MPI = (
    "; a script that takes its rank from a variable such as PMI_RANK needs that MPI: --launcher mpirun"
)


def tell_of_own_launcher(api: Any) -> None:
    """Have ``torch.distributed.launcher.api`` say that each rank starts processes."""
    original = api.launch_agent

    @functools.wraps(original)
    def launch_agent(config: Any, *args: Any, **kwargs: Any) -> Any:
        if ranks := _other_ranks(os.environ):
            _tell(ranks, f"starts {config.nproc_per_node} processes of its own")
            del os.environ[variables.JOB_RANK]  # its processes needn't say it, too
        return original(config, *args, **kwargs)

    api.launch_agent = launch_agent


def watch_groups(torch: Any) -> None:
    """Have ``init_process_group`` say that a group is not the job's, and end with SIGINT."""
    original = torch.distributed.distributed_c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = arguments_given(signature, args, kwargs) or {}
        ranks = _other_ranks(os.environ)
        if ranks and (size := _own_group(given, os.environ)):
            more = "" if size > 1 else _WANTS_MPI
            _tell(ranks, f"makes a process group of {size} of its own", more)
        with _ended_by_interrupts():
            return original(*args, **kwargs)

    replace_everywhere(original, init_process_group)


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Let SIGINT end this process at once, where it would raise KeyboardInterrupt.

    torch waits for the other ranks in C++, where Python raises nothing until that wait is over.
    """
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not raises or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _tell(ranks: int, what: str, more: str = "") -> None:
    log_once(
        f"warning: each of the job's {ranks} ranks {what}, so {ranks} separate models are trained; "
        f"start the script with -n 1, or have `cpulaunch run` start all of its processes{more}",
        every_rank=True,
    )


def _other_ranks(environ: Mapping[str, str]) -> int:
    """The number of the job's ranks, in its first one and the processes of that; 0 in others and if alone."""
    rank, _, size = environ.get(variables.JOB_RANK, "").partition("/")
    return int(size) if rank == "0" and size != "1" else 0


def _own_group(given: Mapping[str, Any], environ: Mapping[str, str]) -> int | None:
    """The size of the group that is made of the arguments ``given``, in its last process.

    Within the job's first rank, this is never the job's group, whose last process is another rank.
    """
    rank, size = _number(given, environ, "rank"), _number(given, environ, "world_size")
    return size if rank is not None and size is not None and rank == size - 1 else None


def _number(given: Mapping[str, Any], environ: Mapping[str, str], name: str) -> int | None:
    """``rank`` or ``world_size``, as torch finds it; None where it is in a store or a URL."""
    number = given.get(name, -1)
    if isinstance(number, int) and number >= 0:
        return number
    text = environ.get(name.upper(), "")
    by_environment = given.get("store") is None and given.get("init_method") in (None, "env://")
    return int(text) if by_environment and text.isdecimal() else None


def make_groups_of_one(torch: Any) -> None:
    """Where a script makes the group of all ranks, the instance is alone in it; one line says so."""
    original = torch.distributed.distributed_c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = arguments_given(signature, args, kwargs)
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
    """Whether the script itself says who is in the group."""
    by_argument = any(given.get(name, -1) not in (-1, None) for name in ("rank", "world_size", "store"))
    by_url = given.get("init_method") not in (None, "env://")
    return by_argument or by_url or {"RANK", "WORLD_SIZE"} <= environ.keys()
