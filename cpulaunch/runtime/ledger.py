"""What this rank writes into its ledger beside the process group ccl: optimizer steps, and other groups."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

from cpulaunch import ledger
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.runtime import ledger_groups, telemetry, tracing
from cpulaunch.runtime.communication import Communication
from cpulaunch.runtime.ledger_header import Header
from cpulaunch.runtime.patches.groups import replace_everywhere

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
    _watch_groups(torch, header, memory, recorder)
    tracer = tracing.watch(torch, memory)
    if recorder:
        recorder.flops.traced = tracer.wants_next


def _is_recorded() -> bool:
    return bool(rank_setting("watch.telemetry", os.environ) != "none")


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
        is_rank = ledger.of_this_process is not None  # and not a process that was forked from it
        slot = ledger_groups.free_slot(memory) if is_rank and size > 1 else -1
        if slot < 0:
            return init(*args, **kwargs)
        now = time.monotonic_ns()
        waits = ledger.Operation(0, ledger.STARTED, ledger.MEETING, "", 0, now, now, 0, -1, "")
        ledger_groups.write(memory, slot, ledger.Group("", "", size, rank, 1, (waits,)))
        try:
            return init(*args, **kwargs)
        finally:
            ledger_groups.clear(memory, slot)

    replace_everywhere(init, init_process_group)


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
        if is_rank and not mirrors and any(backend != "ccl" for backend, _ in c10d._world.pg_map.values()):
            from cpulaunch.runtime.last_words import say_before_abort
            from cpulaunch.runtime.ledger_mirror import OF_ONE_SIZE, Mirror

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
        from cpulaunch.runtime.last_words import nothing_said

        try:
            with nothing_said():
                return destroy(*args, **kwargs)
        finally:
            for mirror in mirrors:
                mirror.forget_destroyed()

    replace_everywhere(make, make_group)
    replace_everywhere(destroy, destroy_process_group)
