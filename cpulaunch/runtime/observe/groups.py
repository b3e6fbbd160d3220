"""Records in the ledger that a group is being created, and observes groups of backends other than ccl."""

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
from cpulaunch.runtime.observe.mirror import SAME_SIZE, Mirror
from cpulaunch.runtime.observe.operations import started_operation

_PARAMETERS = ("group_size", "group_rank", "global_ranks_in_group", "group_name")
"""Parameters of torch's ``_new_process_group_helper`` that are read here."""


def _record_init(torch: Any, observers: Observers) -> None:
    """Record calls of ``init_process_group``, in which a rank waits for the others."""
    init = torch.distributed.distributed_c10d.init_process_group

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        rank = _number(kwargs.get("rank"), "RANK", 0)
        size = _number(kwargs.get("world_size"), "WORLD_SIZE", 1)
        with _recorded(observers.memory, ledger.MEETING, ledger.Group("", "", size, rank, 1, ())):
            return init(*args, **kwargs)

    replace_everywhere(init, init_process_group)


def _watch_new_groups(torch: Any, observers: Observers) -> None:
    """Record calls of ``new_group``; start the observers at the first group of a backend other than ccl."""
    c10d = torch.distributed.distributed_c10d
    original = c10d._new_process_group_helper
    signature = inspect.signature(original)
    if missing := [name for name in _PARAMETERS if name not in signature.parameters]:
        raise LookupError(f"{original.__name__} has no parameter {missing[0]}")

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        arguments = bound_arguments(signature, args, kwargs) or {}
        with _new_group(observers.memory, *(arguments.get(each) for each in _PARAMETERS)):
            group = original(*args, **kwargs)
        if ledger.of_this_process is not None:  # None in a forked process
            observers.add_group(c10d._world.pg_map)
        return group

    replace_everywhere(original, new_group)


def _new_group(
    memory: Any, size: Any, rank: Any, ranks: Any, name: Any
) -> contextlib.AbstractContextManager[None]:
    if size is None or rank is None or not ranks or not name:  # not a member, or the default group
        return contextlib.nullcontext()
    members = ledger.members_text(ranks)
    return _recorded(memory, ledger.NEW_GROUP, ledger.Group(name, "", size, rank, 1, (), members))


@contextlib.contextmanager
def _recorded(memory: Any, kind: str, group: ledger.Group) -> Iterator[None]:
    """Record in this context that the group is being created."""
    is_rank = ledger.of_this_process is not None  # None in a forked process
    # Leave a slot for the created group.
    slot = records.free_slot(memory, spare=1) if is_rank and group.size > 1 else -1
    if slot < 0:
        yield
        return
    now, thread = time.monotonic_ns(), threading.get_native_id()
    records.write(memory, slot, group._replace(operations=(started_operation(0, kind, now, thread),)))
    try:
        yield
    finally:
        records.clear(memory, slot)


def _number(value: Any, variable: str, otherwise: int) -> int:
    if isinstance(value, int) and value >= 0:
        return value
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise


def _mirror_others(torch: Any, observers: Observers) -> None:
    """Start the mirror when the first group of a backend other than ccl is created."""
    # The flight recorder reads this variable at the first collective.
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
            with abort.handler_removed():
                return destroy(*args, **kwargs)
        finally:
            for mirror in mirrors:
                mirror.forget_destroyed()

    replace_everywhere(destroy, destroy_process_group)
    observers.at_other_group(begin)


def _watch_calls(torch: Any, observers: Observers) -> None:
    group = torch._C._distributed_c10d.ProcessGroup
    _at_other_group(torch, observers, lambda each: each.watch_calls(group, SAME_SIZE if mirrors else ()))


def _watch_waits(torch: Any, observers: Observers) -> None:
    _at_other_group(torch, observers, lambda each: each.watch_waits(torch._C._distributed_c10d.Work))


def _watch_parallel(torch: Any, observers: Observers) -> None:
    parallel = torch.nn.parallel.DistributedDataParallel
    _at_other_group(torch, observers, lambda each: each.watch_parallel(parallel))


def _at_other_group(torch: Any, observers: Observers, begin: Callable[[Communication], object]) -> None:
    if observers.recorder:
        observers.at_other_group(lambda: begin(_communication(torch, observers)))


def _communication(torch: Any, observers: Observers) -> Communication:
    """Return the recorder's `Communication`, which is created when it is first needed."""
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
        "records that the rank waits for the others",
        "a rank that never joins is not named",
        _record_init,
    ),
    Change(
        (_MAKES_GROUPS,),
        (_WORLD + "pg_map",),
        "records that the rank waits for the others, and which backend a group has",
        "stall reports lack groups of backends other than ccl, and their communication is not counted",
        _watch_new_groups,
    ),
    Change(
        (
            "distributed.distributed_c10d.destroy_process_group",
            *(_GROUP + name for name in (*SAME_SIZE, "send", "recv", "recv_anysource", "monitored_barrier")),
        ),
        (
            "_C._distributed_c10d._dump_fr_trace_json",
            *(_GROUP + name for name in ("_get_sequence_number_for_group", "group_name", "group_desc")),
            *(_GROUP + name for name in ("rank", "size")),
            _WORLD + "pg_map",
            _WORLD + "pg_names",
        ),
        "records the last operations of groups of backends other than ccl",
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
