"""Records groups in this rank's ledger: those that are being made, and those of backends other than ccl."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from cpulaunch import ledger
from cpulaunch.runtime.hooks import Change, bound_arguments, replace_everywhere
from cpulaunch.runtime.observe import abort, records
from cpulaunch.runtime.observe.communication import CALLS, Communication
from cpulaunch.runtime.observe.ledger import Observers, mirrors
from cpulaunch.runtime.observe.mirror import OF_ONE_SIZE, Mirror

_OF_GROUP = ("group_size", "group_rank", "global_ranks_in_group", "group_name")
"""Parameters of torch's function that makes groups."""


def _note_meeting(torch: Any, observers: Observers) -> None:
    """Record in the ledger that this rank waits for the others in ``init_process_group``."""
    init = torch.distributed.distributed_c10d.init_process_group

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        rank = _number(kwargs.get("rank"), "RANK", 0)
        size = _number(kwargs.get("world_size"), "WORLD_SIZE", 1)
        with _meeting(observers.memory, ledger.MEETING, ledger.Group("", "", size, rank, 1, ())):
            return init(*args, **kwargs)

    replace_everywhere(init, init_process_group)


def _watch_new_groups(torch: Any, observers: Observers) -> None:
    """Record waits in ``new_group`` and its callers; start the watchers at another backend's first group."""
    c10d = torch.distributed.distributed_c10d
    make = c10d._new_process_group_helper
    signature = inspect.signature(make)
    if missing := [name for name in _OF_GROUP if name not in signature.parameters]:
        raise LookupError(f"{make.__name__} has no parameter {missing[0]}")

    @functools.wraps(make)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        given = bound_arguments(signature, args, kwargs) or {}
        with _new_group(observers.memory, *(given.get(each) for each in _OF_GROUP)):
            made = make(*args, **kwargs)
        if ledger.of_this_process is not None:  # not in a process forked from the rank
            observers.group_was_made(c10d._world.pg_map)
        return made

    replace_everywhere(make, make_group)


def _new_group(
    memory: Any, size: Any, rank: Any, ranks: Any, name: Any
) -> contextlib.AbstractContextManager[None]:
    if size is None or rank is None or not ranks or not name:  # not a member, or the group of all ranks
        return contextlib.nullcontext()
    members = ledger.members_text(ranks)
    return _meeting(memory, ledger.NEW_GROUP, ledger.Group(name, "", size, rank, 1, (), members))


@contextlib.contextmanager
def _meeting(memory: Any, kind: str, group: ledger.Group) -> Iterator[None]:
    """Keep the group in the ledger as one that is being made."""
    is_rank = ledger.of_this_process is not None  # not in a process forked from it
    # Leave a place for the group itself.
    slot = records.free_slot(memory, spare=1) if is_rank and group.size > 1 else -1
    if slot < 0:
        yield
        return
    now, thread = time.monotonic_ns(), threading.get_native_id()
    waits = ledger.Operation(0, ledger.STARTED, kind, "", 0, now, now, 0, -1, "", thread=thread)
    records.write(memory, slot, group._replace(operations=(waits,)))
    try:
        yield
    finally:
        records.clear(memory, slot)


def _number(value: Any, variable: str, otherwise: int) -> int:
    if isinstance(value, int) and value >= 0:
        return value
    said = os.environ.get(variable, "")
    return int(said) if said.isdecimal() else otherwise


def _mirror_others(torch: Any, observers: Observers) -> None:
    """Start a thread that copies other backends' groups from torch's flight recorder, once there is one."""
    # torch's flight recorder, which also records gloo, reads this variable at the first collective.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(4 * ledger.OPERATIONS))
    destroy = torch.distributed.distributed_c10d.destroy_process_group

    def begin() -> None:
        communication = _communication(torch, observers) if observers.recorder else None
        mirror = Mirror(torch, observers.header, observers.memory, communication)
        mirrors.append(mirror)
        mirror.start()
        abort.watch(mirror.look)

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        for mirror in mirrors:
            mirror.look_before_end()
        try:
            with abort.nothing_said():
                return destroy(*args, **kwargs)
        finally:
            for mirror in mirrors:
                mirror.forget_destroyed()

    replace_everywhere(destroy, destroy_process_group)
    observers.at_other_group(begin)


def _watch_calls(torch: Any, observers: Observers) -> None:
    group = torch._C._distributed_c10d.ProcessGroup
    _at_other_group(torch, observers, lambda each: each.watch_calls(group, OF_ONE_SIZE if mirrors else ()))


def _watch_waits(torch: Any, observers: Observers) -> None:
    _at_other_group(torch, observers, lambda each: each.watch_waits(torch._C._distributed_c10d.Work))


def _watch_parallel(torch: Any, observers: Observers) -> None:
    parallel = torch.nn.parallel.DistributedDataParallel
    _at_other_group(torch, observers, lambda each: each.watch_parallel(parallel))


def _at_other_group(torch: Any, observers: Observers, begin: Callable[[Communication], object]) -> None:
    if observers.recorder:
        observers.at_other_group(lambda: begin(_communication(torch, observers)))


def _communication(torch: Any, observers: Observers) -> Communication:
    """Return the communication of the rank's recorder; make it when the first part of it is watched."""
    recorder = observers.recorder
    assert recorder
    if recorder.communication is None:
        recorder.communication = Communication(torch)
    return recorder.communication


_GROUP = "_C._distributed_c10d.ProcessGroup."
_WORLD = "distributed.distributed_c10d._world."
_MAKES_GROUPS = "distributed.distributed_c10d._new_process_group_helper"

CHANGES = (
    Change(
        ("distributed.distributed_c10d.init_process_group",),
        (),
        "notes that the rank waits for the others",
        "a rank that never joins is not named",
        _note_meeting,
    ),
    Change(
        (_MAKES_GROUPS,),
        (_WORLD + "pg_map",),
        "notes that the rank waits for the others, and which backend a group has",
        "stall reports lack groups of backends other than ccl, and their communication is not counted",
        _watch_new_groups,
    ),
    Change(
        (
            "distributed.distributed_c10d.destroy_process_group",
            *(
                _GROUP + name
                for name in (*OF_ONE_SIZE, "send", "recv", "recv_anysource", "monitored_barrier")
            ),
        ),
        (
            "_C._distributed_c10d._dump_fr_trace_json",
            *(_GROUP + name for name in ("_get_sequence_number_for_group", "group_name", "group_desc")),
            *(_GROUP + name for name in ("rank", "size")),
            _WORLD + "pg_map",
            _WORLD + "pg_names",
        ),
        "notes the last operations of groups of backends other than ccl",
        "stall reports lack the operations of backends other than ccl",
        _mirror_others,
    ),
    Change(
        tuple(_GROUP + name for name in CALLS),
        (),
        "counts the bytes of operations of backends other than ccl, and when the first one was called",
        "communication of backends other than ccl is incomplete in telemetry",
        _watch_calls,
    ),
    Change(
        ("_C._distributed_c10d.Work.wait",),
        (),
        "measures how long the program waits for backends other than ccl",
        "waiting for backends other than ccl is missing in telemetry",
        _watch_waits,
    ),
    Change(
        ("nn.parallel.DistributedDataParallel.__init__",),
        ("nn.parallel.DistributedDataParallel._set_ddp_runtime_logging_sample_rate",),
        "makes DistributedDataParallel time each step (by default, one of a hundred)",
        "waiting within DistributedDataParallel is missing in telemetry",
        _watch_parallel,
    ),
)
