"""What this rank writes into its ledger beside the process group ccl: optimizer steps, and other groups."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from cpulaunch import ledger
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.settings import Table
from cpulaunch.runtime.change.groups import arguments_given, replace_everywhere
from cpulaunch.runtime.observe import records, telemetry, tracing
from cpulaunch.runtime.observe.communication import Communication
from cpulaunch.runtime.observe.records import Header

_OF_GROUP = ("group_size", "group_rank", "global_ranks_in_group", "group_name")
"""Parameters of the function of torch's that makes groups."""

mirrors: list[Any] = []
"""The thread that copies other groups, once there is one."""


def keep(torch: Any) -> None:
    """Have this rank's ledger written, if it has one."""
    memory = ledger.of_this_process
    if memory is None:
        return
    header = Header(memory)
    recorder = telemetry.record(torch, memory) if _is_recorded() else None
    _count_steps(torch, header, recorder)
    _note_meeting(torch, memory)
    _note_new_groups(torch, memory)
    _look_through_wrappers(torch)
    _watch_groups(torch, header, memory, recorder)
    tracer = tracing.watch(torch, memory)
    if recorder:
        recorder.flops.traced = tracer.wants_next


def _is_recorded() -> bool:
    return rank_setting(Table.watch.telemetry, os.environ) != "none"


def _count_steps(torch: Any, header: Header, recorder: telemetry.Recorder | None) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    original = torch.optim.Optimizer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        header.expect_steps()
        if recorder:
            recorder.begins(time.monotonic_ns())

    def count(optimizer: Any) -> None:
        header.add_step()
        if recorder:
            recorder.stepped(optimizer)

    uncompiled = torch._disable_dynamo(count)  # which loads dynamo when it is called

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            uncompiled(optimizer)
        else:
            count(optimizer)

    torch.optim.Optimizer.__init__ = init
    register_optimizer_step_post_hook(after_step)


def _note_meeting(torch: Any, memory: Any) -> None:
    """The ledger says that this rank waits for the others in ``init_process_group``."""
    init = torch.distributed.distributed_c10d.init_process_group

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        rank = _number(kwargs.get("rank"), "RANK", 0)
        size = _number(kwargs.get("world_size"), "WORLD_SIZE", 1)
        with _meeting(memory, ledger.MEETING, ledger.Group("", "", size, rank, 1, ())):
            return init(*args, **kwargs)

    replace_everywhere(init, init_process_group)


def _note_new_groups(torch: Any, memory: Any) -> None:
    """The same in ``new_group``, and what calls it."""
    make = getattr(torch.distributed.distributed_c10d, "_new_process_group_helper", None)
    signature = inspect.signature(make) if make else None
    if make is None or signature is None or not signature.parameters.keys() >= set(_OF_GROUP):
        return

    @functools.wraps(make)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        given = arguments_given(signature, args, kwargs) or {}
        size, rank, ranks, name = (given.get(each) for each in _OF_GROUP)
        if size is None or rank is None or not ranks or not name:  # not a member, or the group of all ranks
            return make(*args, **kwargs)
        members = ledger.members_text(ranks)
        with _meeting(memory, ledger.NEW_GROUP, ledger.Group(name, "", size, rank, 1, (), members)):
            return make(*args, **kwargs)

    replace_everywhere(make, make_group)


def _look_through_wrappers(torch: Any) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch's wrapper calls a group once all ranks have come.

    ccl says itself who is late, and whose calls differ, so torch gets its groups without one.
    """
    c10d = torch.distributed.distributed_c10d
    wrap = getattr(c10d, "_create_process_group_wrapper", None)
    if wrap is None:
        return

    @functools.wraps(wrap)
    def wrapper(wrapped_pg: Any, *args: Any, **kwargs: Any) -> Any:
        if type(wrapped_pg).__name__ == "ProcessGroupCCL":
            return wrapped_pg
        return wrap(wrapped_pg, *args, **kwargs)

    c10d._create_process_group_wrapper = wrapper


@contextlib.contextmanager
def _meeting(memory: Any, kind: str, group: ledger.Group) -> Iterator[None]:
    """The group is in the ledger, as one that is being made."""
    is_rank = ledger.of_this_process is not None  # and not a process that was forked from it
    # The group itself is to have a place, too.
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


def _watch_groups(torch: Any, header: Header, memory: Any, recorder: telemetry.Recorder | None) -> None:
    """Groups of other backends than ccl are in the ledger, too, from when the first one is made."""
    c10d = torch.distributed.distributed_c10d
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None or not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"):
        return
    # torch's flight recorder, which gloo has, too, looks at it when the first collective is called.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(4 * ledger.OPERATIONS))

    @functools.wraps(make)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        is_rank = ledger.of_this_process is not None  # and not a process that was forked from it
        from cpulaunch.runtime.observe.mirror import OF_ONE_SIZE, Mirror, is_mirrored

        if is_rank and not mirrors and any(is_mirrored(name) for name, _ in c10d._world.pg_map.values()):
            from cpulaunch.runtime.observe.abort import say_before_abort

            communication = Communication(torch, but=OF_ONE_SIZE) if recorder else None
            mirrors.append(Mirror(torch, header, memory, communication))
            mirrors[0].start()
            say_before_abort(mirrors[0].look)
            if recorder:
                recorder.communication = communication
        return made

    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        from cpulaunch.runtime.observe.abort import nothing_said

        for mirror in mirrors:
            mirror.look_before_end()
        try:
            with nothing_said():
                return destroy(*args, **kwargs)
        finally:
            for mirror in mirrors:
                mirror.forget_destroyed()

    replace_everywhere(make, make_group)
    replace_everywhere(destroy, destroy_process_group)
