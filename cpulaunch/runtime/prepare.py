"""``prepare``: the one call between a plain training script and the fastest one."""

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
from cpulaunch.runtime.change.precision import agree, chosen
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import training_settings

T = TypeVar("T")

prepared: weakref.WeakSet[Any] = weakref.WeakSet()
"""All objects that ``prepare`` has returned."""
precision_owners.append(prepared.__contains__)

_results: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Object passed to ``prepare`` → the object that it returned, if that is another one."""


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
    """Make models, optimizers, learning rate schedulers and data loaders ready, in the order given.

    ``model, optimizer = cpulaunch.prepare(model, optimizer)``: several objects are returned as a tuple, one
    object by itself. Every rank has to call this with the same objects. A model gets the engine's bf16 (see
    ``autocast``), rank 0's weights and, with more than one rank, data parallelism. An optimizer gets its
    fused step. A data loader gets its rank's shard of the data, shuffled anew in each epoch, in batches of
    the same size. Give a model and its optimizer in one call. Prepared objects are returned unchanged.

    ``find_unused_parameters``: for models that use only some of their parameters in a step. ``static_graph``:
    for models that use the same parameters in each step. ``bucket_mb``: size of DDP's buckets in MB (2²⁰
    bytes). ``compress_gradients``: ``"none"``, or ``"bf16"`` on the wire; gloo and oneCCL then also sum in
    bf16. None: as planned.

    Raises UsageError for objects of other types, and for data loaders that can't be sharded.
    """
    _check_types(objects)
    settings = training_settings()
    compress = settings.compress_gradients if compress_gradients is None else compress_gradients
    if compress not in ("none", "bf16"):
        raise UsageError(f"prepare: compress_gradients is {compress!r}; valid: none, bf16")
    distributed.init()
    agree()
    new = [thing for thing in objects if _prepared_from(thing) not in prepared]
    models = [m for m in new if isinstance(m, nn.Module) and not isinstance(m, DistributedDataParallel)]
    optimized = _apply_engine(models, [o for o in new if isinstance(o, Optimizer)])
    results = []  # keeps prepared objects alive until they are returned
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
            if chosen().bf16:
                result.register_forward_pre_hook(_check_autocast)
        prepared.add(result)
        results.append(result)
        if result is not thing:
            _results[thing] = weakref.ref(result)
    returned = tuple(_prepared_from(thing) for thing in objects)
    return returned[0] if len(returned) == 1 else returned


def _check_types(objects: tuple[Any, ...]) -> None:
    if not objects:
        raise UsageError("prepare was given nothing: prepare(model, optimizer)")
    for thing in objects:
        if not isinstance(thing, (nn.Module, Optimizer, LRScheduler, DataLoader)):
            raise UsageError(
                "prepare takes models, optimizers, learning rate schedulers and data loaders, not "
                f"{type(thing).__name__}"
            )


def _prepared_from(thing: Any) -> Any:
    """Return what ``prepare`` returned for ``thing``; ``thing`` itself if that is the same, or gone."""
    result = _results[thing]() if thing in _results else None
    return thing if result is None else result


def _apply_engine(models: list[nn.Module], optimizers: list[Optimizer]) -> dict[int, nn.Module]:
    """Prepare models and optimizers by the chosen engine; return ``id`` of a given model → model to train."""
    ready, left = {}, list(optimizers)
    for model in models:
        optimizer, why_not = own_optimizer(model, models, optimizers)
        engine = engines.load(chosen().engine)
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
        native.optimize_optimizer(optimizer)
    return ready


def own_optimizer(
    model: nn.Module, models: list[nn.Module], optimizers: list[Optimizer]
) -> tuple[Optimizer | None, str]:
    """Return the one optimizer that trains ``model`` and no other of ``models``; else None and why."""
    own = [optimizer for optimizer in optimizers if _parameters(optimizer) & set(model.parameters())]
    if not own:
        return None, "it needs its optimizer in the same call of prepare"
    if len(own) > 1:
        return None, "it has several optimizers"
    if any(other is not model and _parameters(own[0]) & set(other.parameters()) for other in models):
        return None, f"its {type(own[0]).__name__} trains another model, too"
    return own[0], ""


def _data_parallel(model: nn.Module, **options: Any) -> nn.Module:
    """Return ``model`` in DDP if there are several ranks and something to train."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        log_once(f"{type(model).__name__} has nothing to train: it is left without data parallelism")
        if distributed.world_size() > 1:
            distributed.broadcast(model)
        return model
    return distributed.data_parallel(model, **options) if distributed.world_size() > 1 else model


def _parameters(optimizer: Optimizer) -> set[torch.Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _compile(model: nn.Module) -> None:
    """Compile in place, so that names in the state dict stay.  Needs a C++ compiler."""
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        log_once("torch.compile needs a C++ compiler, and this host has none: training goes on without it")
        return
    model.compile()


def _check_autocast(model: nn.Module, inputs: Any) -> None:
    if model.training and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
        log_once(
            f"{type(distributed.unwrap(model)).__name__} runs outside of `with "
            "cpulaunch.autocast():`, so its layers are not in bf16"
        )


def _check_steps(optimizer: Optimizer) -> None:
    """Refuse steps with incomplete gradients, and warn at exit of a training that never stepped."""
    name = type(optimizer).__name__
    if not any(parameter.requires_grad for parameter in _parameters(optimizer)):
        log_once(f"{name} has nothing to train: none of its parameters requires a gradient")
    stepped, own_process, weak = False, os.getpid(), weakref.ref(optimizer)

    def before_step(self: Optimizer, *_: Any) -> None:
        nonlocal stepped
        check_complete(self)
        stepped = True

    def warn_if_never_stepped() -> None:
        # A failure has its own message, a forked child trains nothing, and a checkpoint may come from a
        # training that is complete.
        restored = (own := weak()) is not None and own.state
        if not (stepped or restored or hasattr(sys, "last_type")) and os.getpid() == own_process:
            log_once(f"{name} was prepared, but never stepped: this script has not trained")

    optimizer.register_step_pre_hook(before_step)
    atexit.register(warn_if_never_stepped)
