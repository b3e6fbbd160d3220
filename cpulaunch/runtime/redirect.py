"""Scripts that know nothing of cpulaunch get the planned backend, precision and fused optimizers.

torch calls ``autoload`` at the end of its own import (entry point ``torch.backends``). It acts in ranks of a
cpulaunch job only. Then, unless ``training.as_written``:

- ``init_process_group`` without a backend, or with gloo or mpi, makes a group of the planned backend;
- accelerate and transformers train on the CPU, with the planned precision where the script names none;
- optimizers take their fused step, where torch has one and the script has not chosen.

A program that doesn't import torch pays nothing for this.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from cpulaunch.runtime.planned import Planned, planned
from cpulaunch.runtime.say import say

REPLACED = (None, "gloo", "mpi", "ccl", "cpu:gloo", "cpu:gloo,cuda:nccl")
"""Backends, as scripts name them, in whose place the planned one is taken."""


def autoload() -> None:
    """Called by torch at the end of its import."""
    plan = planned()
    if not plan.job or plan.as_written or plan.backend is None:
        return
    from torch import distributed

    if not distributed.is_available():
        return
    _redirect_init_process_group(plan)
    _fuse_optimizers()
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    os.environ.setdefault("ACCELERATE_MIXED_PRECISION", _mixed_precision(plan))
    sys.meta_path.insert(0, _AfterImport(plan))


def _mixed_precision(plan: Planned) -> str:
    """accelerate's word for the planned precision."""
    from cpulaunch.runtime.precision import choose, cpu_flags

    return "bf16" if choose(plan, cpu_flags(), "", None).bf16 else "no"


def _redirect_init_process_group(plan: Planned) -> None:
    from torch import distributed
    from torch.distributed import distributed_c10d

    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        said = backend.lower() if isinstance(backend, str) else backend
        if said not in REPLACED:
            return original(backend, *args, **kwargs)
        _tell(said, plan)
        return original(plan.backend, *args, **kwargs)

    for module in (distributed, distributed_c10d):
        setattr(module, "init_process_group", init_process_group)  # noqa: B010


def _tell(said: str | None, plan: Planned) -> None:
    changes = []
    if said != plan.backend:
        changes.append(f"backend {said or '(none named)'} -> {plan.backend}")
    if _accelerate_starts:
        precision = _mixed_precision(plan)
        changes.append(f"accelerate on the CPU, in {_WORDS[precision]} where the script names no precision")
    if changes:
        _told.append("; ".join([*changes, "optimizers fused where torch can"]))
        say(f"overridden in this script: {_told[0]} (--as-written leaves it as it is)")


_told: list[str] = []
_accelerate_starts: list[bool] = []  # not empty while accelerate makes its group
_WORDS = {"bf16": "bf16", "no": "fp32"}


def _fuse_optimizers() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer in seen:
            return
        from cpulaunch.runtime import native

        seen.add(optimizer)
        if native.fuse(optimizer):
            native.keep_layouts(optimizer)
            if not _told:
                name = type(optimizer).__name__
                say(f"overridden in this script: {name} takes its fused step (--as-written leaves it)")

    register_optimizer_step_pre_hook(before_step)


class _AfterImport(MetaPathFinder):
    """Finds no module, but changes some when they have been imported: at the next import after theirs.

    Some are being imported when torch is, as they import torch themselves; both libraries import more after
    what is changed here.
    """

    def __init__(self, plan: Planned) -> None:
        self._pending: dict[str, Callable[[ModuleType], None]] = {
            "accelerate.state": functools.partial(_change_accelerate, plan=plan),
            "transformers.training_args": _change_transformers,
        }

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        for pending in list(self._pending):
            module = sys.modules.get(pending)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                self._pending.pop(pending)(module)


def _change_accelerate(module: ModuleType, plan: Planned) -> None:
    """accelerate takes a GPU, or no other rank, unless told; and of backends it knows gloo and mpi only."""
    from torch import distributed

    original = module.PartialState.__init__

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if kwargs.get("backend") in REPLACED:
            kwargs.pop("backend", None)
        _accelerate_starts.append(True)
        try:
            original(self, True, **kwargs)
        finally:
            _accelerate_starts.pop()
        if self.backend is not None and distributed.is_initialized():
            self.backend = distributed.get_backend()

    module.PartialState.__init__ = __init__
    _let_fsdp_run_on_cpus(module)


def _let_fsdp_run_on_cpus(module: ModuleType) -> None:
    """accelerate 1.15 takes FSDP for granted on GPUs, and on CPUs trains with DDP in its place, silently."""
    original = module.AcceleratorState.__init__
    kinds = module.DistributedType

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None or self.distributed_type != kinds.MULTI_CPU:
            return
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = module.PartialState._shared_state["distributed_type"] = kinds.FSDP

    module.AcceleratorState.__init__ = __init__


def _change_transformers(module: ModuleType) -> None:
    """TrainingArguments refuse bf16 without use_cpu where there is no GPU."""
    original = module.TrainingArguments.__post_init__

    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.use_cpu = True
        original(self, *args, **kwargs)

    module.TrainingArguments.__post_init__ = __post_init__
