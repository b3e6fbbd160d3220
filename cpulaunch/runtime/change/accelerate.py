"""accelerate: trains on CPUs with the planned backend and precision, also with FSDP and DeepSpeed."""

from __future__ import annotations

import functools
import os
from typing import Any

from cpulaunch.runtime.change.accelerate_resume import resume_own_states
from cpulaunch.runtime.change.base import announce_with_group, precision_owners
from cpulaunch.runtime.change.groups import is_replaced
from cpulaunch.runtime.hooks import Change
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings

TRIED = ("1.15.0",)


def _set_defaults(state: Any, settings: TrainingSettings) -> None:
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "bf16" if settings.precision == "bf16" else "no")


def _own_precision(state: Any, settings: TrainingSettings) -> None:
    """Register accelerate as the library that sets its models' precision."""
    precision_owners.append(lambda model: bool(state.PartialState._shared_state))


def _train_on_cpus(state: Any, settings: TrainingSettings) -> None:
    """Pass ``cpu=True`` to ``PartialState``; with DeepSpeed, ``cpu=False`` and a CPU backend."""
    import torch

    original = state.PartialState.__init__
    change = f"accelerate on the CPU, in {settings.precision} unless the script says otherwise"

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if is_replaced(torch, kwargs.get("backend")):
            kwargs.pop("backend", None)
        if with_deepspeed := _with_deepspeed():
            kwargs.setdefault("backend", "gloo")
        with announce_with_group(change):
            original(self, not with_deepspeed, **kwargs)
        if self.device.type == "cpu":
            self.device = torch.device("cpu")  # FSDP 1 doesn't accept cpu:0

    state.PartialState.__init__ = __init__


def _run_deepspeed_on_cpus(state: Any, settings: TrainingSettings) -> None:
    """Unset ACCELERATE_USE_CPU for DeepSpeed; with it, accelerate silently uses DDP instead."""
    original = state.AcceleratorState.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if _with_deepspeed():
            os.environ.pop("ACCELERATE_USE_CPU", None)
        original(self, *args, **kwargs)

    state.AcceleratorState.__init__ = __init__


def _with_deepspeed() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def _run_fsdp_on_cpus(state: Any, settings: TrainingSettings) -> None:
    """Use FSDP if requested; without GPUs, accelerate silently uses DDP instead."""
    original = state.AcceleratorState.__init__
    kinds = state.DistributedType

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None or self.distributed_type != kinds.MULTI_CPU:
            return
        if self.mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self.mixed_precision)
        if getattr(fsdp_plugin, "fsdp_version", 2) == 1:
            log_once(
                "warning: torch can't save a model of FSDP version 1 on CPUs: use version 2 "
                "(FullyShardedDataParallelPlugin(fsdp_version=2), or FSDP_VERSION=2)"
            )
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = state.PartialState._shared_state["distributed_type"] = kinds.FSDP

    state.AcceleratorState.__init__ = __init__


CHANGES = (
    Change(
        (),
        (),
        "sets `ACCELERATE_USE_CPU` and `ACCELERATE_MIXED_PRECISION`, unless the user has set them",
        "accelerate's own defaults hold",
        _set_defaults,
    ),
    Change(
        (),
        ("PartialState._shared_state",),
        "leaves the precision of models to accelerate",
        "models without mixed precision are trained in the planned precision nevertheless",
        _own_precision,
    ),
    Change(
        ("PartialState.__init__",),
        (),
        "trains on the CPU, on the planned backend",
        "scripts have to choose the CPU themselves, by ACCELERATE_USE_CPU or cpu=True",
        _train_on_cpus,
    ),
    Change(
        ("AcceleratorState.__init__",),
        (),
        "lets DeepSpeed train on CPUs",
        "scripts that ask for DeepSpeed train with DDP",
        _run_deepspeed_on_cpus,
    ),
    Change(
        ("AcceleratorState.__init__",),
        (
            "AcceleratorState.mixed_precision",
            "DistributedType.FSDP",
            "DistributedType.MULTI_CPU",
            "PartialState._shared_state",
        ),
        "lets FSDP train on CPUs",
        "scripts that ask for FSDP may train with DDP",
        _run_fsdp_on_cpus,
    ),
)

OF_ACCELERATOR = (
    Change(
        (
            *(f"Accelerator.{name}" for name in ("__init__", "backward", "load_state", "save_state")),
            "accelerate.data_loader.DataLoaderShard.__iter__",
        ),
        ("Accelerator.save_iteration",),
        "resumes from the last saved state in a restarted job, and skips the batches before it",
        "a restarted job trains from the start unless the script itself resumes",
        resume_own_states,
    ),
)
