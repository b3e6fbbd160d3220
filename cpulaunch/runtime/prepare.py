"""``prepare``: makes a training script's model, optimizer and data loader ready for a job."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import weakref
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from cpulaunch.errors import UsageError
from cpulaunch.runtime import distributed, loaders
from cpulaunch.runtime.accumulate import check_complete
from cpulaunch.runtime.change import engines
from cpulaunch.runtime.change.base import precision_owners
from cpulaunch.runtime.change.engines import native
from cpulaunch.runtime.change.precision import choice, share_rates
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import training_settings

T = TypeVar("T")

prepared: weakref.WeakSet[Any] = weakref.WeakSet()
"""The objects that ``prepare`` has returned."""
precision_owners.append(prepared.__contains__)

_results: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Object passed to ``prepare`` → the object that it returned, if they differ."""


@overload
def prepare(
    one: T,
    /,
    *,
    find_unused_parameters: bool = ...,
    static_graph: bool | None = ...,
    bucket_mb: int | None = ...,
    compress_gradients: str | None = ...,
) -> T: ...
@overload
def prepare(
    *objects: Any,
    find_unused_parameters: bool = ...,
    static_graph: bool | None = ...,
    bucket_mb: int | None = ...,
    compress_gradients: str | None = ...,
) -> tuple[Any, ...]: ...
def prepare(
    *objects: Any,
    find_unused_parameters: bool = False,
    static_graph: bool | None = None,
    bucket_mb: int | None = None,
    compress_gradients: str | None = None,
) -> Any:
    """Prepare models, optimizers, learning rate schedulers and data loaders, and return them.

    ``model, optimizer = cpulaunch.prepare(model, optimizer)``: several objects are returned as a tuple, in
    the order of the arguments.  Every rank must call this with the same objects, and with a model and its
    optimizer in one call.  A model gets rank 0's weights, the engine's layout or kernels and, with several
    ranks, DDP.  An optimizer gets its fused step.  A data loader gets its rank's shard of the data.
    Idempotent: prepared objects are returned unchanged.

    ``find_unused_parameters``: for models that use only some of their parameters in a step.
    ``static_graph``: for models that use the same parameters in each step.  ``bucket_mb``: size of DDP's
    buckets in MB (2²⁰ bytes).  ``compress_gradients``: ``"bf16"`` sends gradients in bf16, and gloo and
    oneCCL then also sum in bf16; or ``"none"``.  None: as planned.

    Raises UsageError for objects of other types, and for data loaders that can't be sharded.
    """
    _check_types(objects)
    settings = training_settings()
    compress = settings.compress_gradients if compress_gradients is None else compress_gradients
    if compress not in ("none", "bf16"):
        raise UsageError(f"prepare: compress_gradients must be none or bf16, got {compress!r}")
    distributed.init()
    share_rates()
    new = [thing for thing in objects if _prepared_from(thing) not in prepared]
    models = [m for m in new if isinstance(m, nn.Module) and not isinstance(m, DistributedDataParallel)]
    optimized = _apply_engine(models, [o for o in new if isinstance(o, Optimizer)])
    results = []  # keeps the prepared objects alive: the global tables hold weak references
    for thing in new:
        result = thing
        if isinstance(thing, DataLoader):
            result = loaders.shard(thing)
        elif isinstance(thing, Optimizer):
            _check_steps(thing)
        elif id(thing) in optimized:
            result = _data_parallel(
                optimized[id(thing)],
                find_unused_parameters=find_unused_parameters,
                static_graph=settings.static_graph if static_graph is None else static_graph,
                bucket_mb=bucket_mb or settings.bucket_mb,
                compress=compress == "bf16",
            )
            if settings.compile:
                _compile(result)
            if choice().bf16:
                result.register_forward_pre_hook(_check_autocast)
        prepared.add(result)
        results.append(result)
        if result is not thing:
            _results[thing] = weakref.ref(result)
    returned = tuple(_prepared_from(thing) for thing in objects)
    return returned[0] if len(returned) == 1 else returned


def _check_types(objects: tuple[Any, ...]) -> None:
    if not objects:
        raise UsageError("prepare needs at least one object: prepare(model, optimizer)")
    for thing in objects:
        if not isinstance(thing, (nn.Module, Optimizer, LRScheduler, DataLoader)):
            raise UsageError(
                "prepare takes models, optimizers, learning rate schedulers and data loaders, not "
                f"{type(thing).__name__}"
            )


def _prepared_from(thing: Any) -> Any:
    """Return the object that ``prepare`` returned for ``thing``; ``thing`` itself if there is none."""
    result = _results[thing]() if thing in _results else None
    return thing if result is None else result


def _apply_engine(models: list[nn.Module], optimizers: list[Optimizer]) -> dict[int, nn.Module]:
    """Apply the engine to models and optimizers; return ``id`` of a model → the model to train."""
    ready, left = {}, list(optimizers)
    for model in models:
        optimizer, why_not = own_optimizer(model, models, optimizers)
        engine = engines.load(choice().engine)
        problem = why_not if engine.needs_optimizer and why_not else engine.problem(model, optimizer)
        if problem:
            log_once(f"{type(model).__name__} gets the engine native: {problem}")
            engine = engines.load("native")
        if engine.broadcast_first and distributed.world_size() > 1:
            distributed.broadcast(model)
        ready[id(model)] = engine.apply(model, optimizer)
        if optimizer is not None:
            left.remove(optimizer)
    for optimizer in left:
        native.fuse(optimizer)
    return ready


def own_optimizer(
    model: nn.Module, models: list[nn.Module], optimizers: list[Optimizer]
) -> tuple[Optimizer | None, str]:
    """Return the only optimizer of ``model`` if it trains no other model; else None and the reason."""
    own = [optimizer for optimizer in optimizers if _parameters(optimizer) & set(model.parameters())]
    if not own:
        return None, "its optimizer was not passed to the same call of prepare"
    if len(own) > 1:
        return None, "it has several optimizers"
    if any(other is not model and _parameters(own[0]) & set(other.parameters()) for other in models):
        return None, f"its {type(own[0]).__name__} trains another model, too"
    return own[0], ""


def _data_parallel(model: nn.Module, **options: Any) -> nn.Module:
    """Wrap ``model`` in DDP if there are several ranks and any parameter requires a gradient."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        log_once(
            f"{type(model).__name__} has no parameter that requires a gradient, so it isn't wrapped in DDP"
        )
        if distributed.world_size() > 1:
            distributed.broadcast(model)
        return model
    return distributed.data_parallel(model, **options) if distributed.world_size() > 1 else model


def _parameters(optimizer: Optimizer) -> set[torch.Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _compile(model: nn.Module) -> None:
    """Compile the model in place, which doesn't rename parameters in its state dict."""
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        log_once("torch.compile needs a C++ compiler, and this host has none: the model is not compiled")
        return
    model.compile()


def _check_autocast(model: nn.Module, inputs: Any) -> None:
    if model.training and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
        log_once(
            f"{type(distributed.unwrap(model)).__name__} runs outside of `with "
            "cpulaunch.autocast():`, so its layers are not in bf16"
        )


def _check_steps(optimizer: Optimizer) -> None:
    """Raise an error at a step with incomplete gradients; warn at exit if there was no step."""
    name = type(optimizer).__name__
    if not any(parameter.requires_grad for parameter in _parameters(optimizer)):
        log_once(f"{name} trains nothing: none of its parameters requires a gradient")
    stepped, own_process, weak = False, os.getpid(), weakref.ref(optimizer)

    def before_step(self: Optimizer, *_: Any) -> None:
        nonlocal stepped
        check_complete(self)
        stepped = True

    def warn_if_never_stepped() -> None:
        # No warning after an exception, in a forked process, or if a checkpoint of a finished training was
        # loaded.
        restored = (own := weak()) is not None and own.state
        if not (stepped or restored or hasattr(sys, "last_type")) and os.getpid() == own_process:
            log_once(f"{name} was prepared, but its step() was never called: nothing was trained")

    optimizer.register_step_pre_hook(before_step)
    atexit.register(warn_if_never_stepped)
