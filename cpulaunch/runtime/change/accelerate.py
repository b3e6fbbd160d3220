"""accelerate: it trains on the CPU, on the planned backend, and in the planned precision by default.

FSDP and DeepSpeed work on CPUs.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from cpulaunch.errors import UsageError
from cpulaunch.runtime.change.accelerate_resume import resume_own_states
from cpulaunch.runtime.change.base import Change, announced_with_group, precision_owners
from cpulaunch.runtime.change.groups import is_replaced
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings

TRIED = ("1.15.0",)


def _set_defaults(state: Any, settings: TrainingSettings) -> None:
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "bf16" if settings.precision == "bf16" else "no")


def _own_precision(state: Any, settings: TrainingSettings) -> None:
    """accelerate sees to the precision of all models of its script."""
    precision_owners.append(lambda model: bool(state.PartialState._shared_state))


def _train_on_cpus(state: Any, settings: TrainingSettings) -> None:
    """``PartialState`` looks for GPUs, unless it gets ``cpu``; of backends for CPUs it knows gloo and mpi.

    DeepSpeed it starts only without ``cpu``, and then takes the backend that it is given.
    """
    import torch

    original = state.PartialState.__init__
    change = f"accelerate on the CPU, in {settings.precision} unless the script says otherwise"

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if is_replaced(torch, kwargs.get("backend")):
            kwargs.pop("backend", None)
        if with_deepspeed := _with_deepspeed():
            kwargs.setdefault("backend", "gloo")
        with announced_with_group(change):
            original(self, not with_deepspeed, **kwargs)
        if self.device.type == "cpu":
            self.device = torch.device("cpu")  # FSDP 1 takes cpu:0 for another device

    state.PartialState.__init__ = __init__


def _run_deepspeed_on_cpus(state: Any, settings: TrainingSettings) -> None:
    """accelerate takes DDP in DeepSpeed's place, without a word, where it is told to use the CPU."""
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
    """accelerate expects FSDP on GPUs only: on CPUs it trains with DDP in its place, without a word."""
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
                "warning: torch can't save a model of FSDP version 1 on CPUs: take version 2 "
                "(FullyShardedDataParallelPlugin(fsdp_version=2), or FSDP_VERSION=2)"
            )
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = state.PartialState._shared_state["distributed_type"] = kinds.FSDP

    state.AcceleratorState.__init__ = __init__


def tell_of_separate_copies(settings: TrainingSettings, state: Any) -> None:
    """For scripts as they are written: have accelerate's state, once made, tell if each rank trains alone.

    It makes a group then, and doesn't use it.  A warning, or with ``--strict`` UsageError.
    """
    original = state.PartialState.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1 and getattr(self, "num_processes", ranks) == 1:
            alone = f"accelerate runs in each of the {ranks} ranks by itself"
            what = f"{alone}, so they train {ranks} separate models"
            remedy = "Accelerator(cpu=True), or no --as-written, trains one"
            if settings.strict:
                raise UsageError(what, hint=remedy)
            log_once(f"warning: {what}; {remedy}")

    state.PartialState.__init__ = __init__


CHANGES = (
    Change((), "", _set_defaults),
    Change(
        ("PartialState._shared_state",),
        "its models without mixed precision are trained in the planned precision nevertheless",
        _own_precision,
    ),
    Change(
        ("PartialState.__init__",),
        "scripts have to choose the CPU themselves, by ACCELERATE_USE_CPU or cpu=True",
        _train_on_cpus,
    ),
    Change(
        ("AcceleratorState.__init__",),
        "scripts that ask for DeepSpeed train with DDP",
        _run_deepspeed_on_cpus,
    ),
    Change(
        (
            "AcceleratorState.__init__",
            "AcceleratorState.mixed_precision",
            "DistributedType.FSDP",
            "DistributedType.MULTI_CPU",
            "PartialState._shared_state",
        ),
        "scripts that ask for FSDP may train with DDP",
        _run_fsdp_on_cpus,
    ),
)

OF_ACCELERATOR = (
    Change(
        (
            "Accelerator.backward",
            "Accelerator.load_state",
            "Accelerator.save_state",
            "Accelerator.save_iteration",
        ),
        "a restarted job trains from the start unless the script goes on itself",
        resume_own_states,
    ),
)
