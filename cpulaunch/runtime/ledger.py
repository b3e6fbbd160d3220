"""What this rank writes into its ledger beside the process group ccl: optimizer steps, and other groups."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

from cpulaunch import ledger
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.runtime import telemetry, tracing
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
            from cpulaunch.runtime.ledger_mirror import Mirror

            mirrors.append(Mirror(torch, header, memory))
            mirrors[0].start()
            if recorder:
                recorder.communication = Communication(torch)
        return made

    replace_everywhere(make, make_group)
