"""Scripts that know nothing of cpulaunch get the planned backend, precision and fused optimizers.

torch calls ``autoload`` at the end of its own import (entry point ``torch.backends``). It acts in ranks of a
cpulaunch job only. Then, unless ``training.as_written``:

- ``init_process_group`` without a backend, or with gloo or mpi, makes a group of the planned backend;
- accelerate and transformers train on the CPU, with the planned precision where the script names none;
- so does a DistributedDataParallel of the script's own: a forward pass outside of all autocast contexts;
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

from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings, training_settings

REPLACED = (None, "gloo", "mpi", "ccl", "cpu:gloo", "cpu:gloo,cuda:nccl")
"""Backends, as scripts name them, in whose place the planned one is taken."""


def autoload() -> None:
    """Called by torch at the end of its import."""
    plan = training_settings()
    if not plan.in_job or plan.as_written or plan.backend is None:
        return
    from torch import distributed

    if not distributed.is_available():
        return
    _redirect_init_process_group(plan)
    if _mixed_precision(plan) == "bf16":
        _autocast_data_parallel()
    _fuse_optimizers()
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    os.environ.setdefault("ACCELERATE_MIXED_PRECISION", _mixed_precision(plan))
    sys.meta_path.insert(0, _AfterImport(plan))


def _mixed_precision(plan: TrainingSettings) -> str:
    """accelerate's word for the planned precision."""
    from cpulaunch.runtime.precision import cpu_flags, decided_precision

    return "bf16" if decided_precision(plan, cpu_flags())[0] == "bf16" else "no"


def _redirect_init_process_group(plan: TrainingSettings) -> None:
    from torch import distributed
    from torch.distributed import distributed_c10d

    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        from cpulaunch.runtime.precision import cpu_flags, decided_precision, warn_if_slow

        warn_if_slow(decided_precision(plan, cpu_flags())[0], cpu_flags())
        said = backend.lower() if isinstance(backend, str) else backend
        if said not in REPLACED:
            return original(backend, *args, **kwargs)
        _tell(said, plan)
        return original(plan.backend, *args, **kwargs)

    for module in (distributed, distributed_c10d):
        setattr(module, "init_process_group", init_process_group)  # noqa: B010


def _tell(said: str | None, plan: TrainingSettings) -> None:
    changes = []
    if said != plan.backend:
        changes.append(f"backend {said or '(none named)'} -> {plan.backend}")
    if _accelerate_starts:
        precision = _mixed_precision(plan)
        changes.append(f"accelerate on the CPU, in {_WORDS[precision]} where the script names no precision")
    elif _mixed_precision(plan) == "bf16":
        changes.append("DDP in bf16 where the script has no autocast")
    if said != plan.backend or _accelerate_starts:
        _say_overridden(*changes, "optimizers fused where torch can")


def _say_overridden(*changes: str) -> None:
    if not _told:
        _told.append("; ".join(changes))
        log_once(f"overridden in this script: {_told[0]} (--as-written leaves it as it is)")


_told: list[str] = []
_accelerate_starts: list[bool] = []  # not empty while accelerate makes its group
_WORDS = {"bf16": "bf16", "no": "fp32"}


def _autocast_data_parallel() -> None:
    """The forward pass of a model that the script itself made a DistributedDataParallel, as accelerate's."""
    from torch import autocast, bfloat16
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils._pytree import tree_map

    original: Any = DistributedDataParallel.forward

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not _is_plain(self):
            return original(self, *inputs, **kwargs)
        _say_overridden("DDP in bf16, as the script has no autocast")
        with autocast("cpu", bfloat16):
            outputs = original(self, *inputs, **kwargs)
        return tree_map(_as_fp32, outputs)

    DistributedDataParallel.forward = functools.wraps(original)(forward)  # type: ignore[method-assign]


def _is_plain(model: Any) -> bool:
    """Whether nobody else has seen to the precision of this DistributedDataParallel."""
    import torch

    nesting = torch.autocast_increment_nesting() - 1  # `enabled=False` is a word, too
    torch.autocast_decrement_nesting()
    accelerate = sys.modules.get("accelerate.state")
    return (
        nesting == 0
        and model not in _prepared()
        and not (accelerate and accelerate.PartialState._shared_state)
        and all(
            weights.dtype == torch.float32 for weights in model.parameters() if weights.is_floating_point()
        )
    )


def _prepared() -> Any:
    """Models that `cpulaunch.prepare` has made ready; it says itself what is wrong with them."""
    prepare = sys.modules.get("cpulaunch.runtime.prepare")
    return prepare.prepared if prepare else ()


def _as_fp32(thing: Any) -> Any:
    import torch

    return thing.float() if isinstance(thing, torch.Tensor) and thing.dtype == torch.bfloat16 else thing


def _fuse_optimizers() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer in seen:
            return
        from cpulaunch.runtime.engines import native

        seen.add(optimizer)
        if native.fuse(optimizer):
            native.keep_layouts(optimizer)
            _say_overridden(f"{type(optimizer).__name__} takes its fused step")

    register_optimizer_step_pre_hook(before_step)


class _AfterImport(MetaPathFinder):
    """Finds no module, but changes some when they have been imported: at the next import after theirs.

    Some are being imported when torch is, as they import torch themselves; both libraries import more after
    what is changed here.
    """

    def __init__(self, plan: TrainingSettings) -> None:
        self._pending: dict[str, Callable[[ModuleType], None]] = {
            "accelerate.state": functools.partial(_change_accelerate, plan=plan),
            "transformers.training_args": _change_transformers,
        }

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        for pending in list(self._pending):
            module = sys.modules.get(pending)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                self._pending.pop(pending)(module)


def _change_accelerate(module: ModuleType, plan: TrainingSettings) -> None:
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
