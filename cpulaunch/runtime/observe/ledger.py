"""The observers of a rank, which write to its ledger: optimizer steps, telemetry and traces."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cpulaunch import ledger
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.settings import Table
from cpulaunch.runtime.hooks import Change
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.observe import records, telemetry
from cpulaunch.runtime.observe.copies import warn_of_separate_copies
from cpulaunch.runtime.observe.records import Header
from cpulaunch.runtime.observe.telemetry import Recorder
from cpulaunch.runtime.observe.tracing import Tracer

if TYPE_CHECKING:
    from cpulaunch.runtime.observe.mirror import Mirror

mirrors: list[Mirror] = []
"""The thread that copies groups of other backends; empty before it is started."""


class Observers:
    """The observers of this process; the context of their changes."""

    def __init__(self, torch: Any, memory: Any) -> None:
        self.memory = memory
        self.header = Header(memory)
        recorded = rank_setting(Table.watch.telemetry, os.environ) != "none"
        self.recorder = telemetry.recorder = Recorder(memory) if recorded else None
        self.tracer = Tracer(torch, memory)
        self._functions: list[Callable[[], object]] = []

    def at_other_group(self, begin: Callable[[], object]) -> None:
        """Call ``begin`` when the first group of a backend other than ccl has been created."""
        self._functions.append(begin)

    def add_group(self, groups: Mapping[Any, Any]) -> None:
        """Update the observers when a group was added to torch's table ``groups``."""
        try:
            if any(records.is_mirrored(backend) for backend, _ in groups.values()):
                functions, self._functions = self._functions, []
                for begin in functions:
                    begin()
        except Exception as e:  # the script must not fail because an observer fails
            log_once(f"warning: groups of backends other than ccl are not watched: {type(e).__name__}: {e}")


def observers(torch: Any) -> Observers | None:
    """Return this process's observers; None if it has no ledger."""
    return None if ledger.of_this_process is None else Observers(torch, ledger.of_this_process)


def _count_steps(torch: Any, observers: Observers) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    header, recorder, tracer = observers.header, observers.recorder, observers.tracer

    def count(optimizer: Any) -> None:
        if not header.steps:
            warn_of_separate_copies(torch)
        header.add_step()
        if recorder:
            recorder.end_step(optimizer)
        tracer.after_step()

    uncompiled = torch._disable_dynamo(count)  # imports dynamo when it is called
    is_compiling = torch.compiler.is_compiling

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling():
            uncompiled(optimizer)
        else:
            count(optimizer)

    register_optimizer_step_post_hook(after_step)


def _expect_steps(torch: Any, observers: Observers) -> None:
    original = torch.optim.Optimizer.__init__
    header, recorder = observers.header, observers.recorder

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        header.expect_steps()
        if recorder:
            recorder.begin(time.monotonic_ns())

    torch.optim.Optimizer.__init__ = init


def _watch_loaders(torch: Any, observers: Observers) -> None:
    if observers.recorder:
        telemetry.watch_loaders(torch, observers.recorder)


def _count_flops(torch: Any, observers: Observers) -> None:
    if observers.recorder:
        from cpulaunch.runtime.observe.flops import Flops

        observers.recorder.flops = Flops(torch)
        observers.recorder.flops.traced = observers.tracer.wants_next


STEPS = Change(
    (),
    ("optim.optimizer.register_optimizer_step_post_hook", "compiler.is_compiling", "_disable_dynamo"),
    "counts optimizer steps, in which telemetry, traces and stall detection are expressed",
    "optimizer steps are not counted: there is no telemetry, and no trace can be taken",
    _count_steps,
)
"""The only change with `--as-written`."""

CHANGES = (
    STEPS,
    Change(
        ("optim.Optimizer.__init__",),
        (),
        "records that the script has an optimizer, and when its first step begins",
        "a job is expected to make optimizer steps only once it has made one",
        _expect_steps,
    ),
    Change(
        ("utils.data.dataloader._BaseDataLoaderIter.__next__",),
        (),
        "measures how long a step waits for its input, and counts samples and tokens",
        "input, samples and tokens are missing in telemetry",
        _watch_loaders,
    ),
    Change(
        (),
        (
            "utils._python_dispatch.TorchDispatchMode",
            "utils._python_dispatch._get_current_dispatch_mode",
            "nn.Buffer",
        ),
        "counts the model's FLOPs in one eager step of ten thousand",
        "FLOPs are not counted, and there is no MFU",
        _count_flops,
    ),
)
