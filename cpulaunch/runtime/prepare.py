"""``prepare``: the one call between a plain training script and the fastest one."""

from __future__ import annotations

import atexit
import shutil
import sys
import weakref
from collections.abc import Iterator
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
from cpulaunch.runtime.engines import ipex, native
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.precision import chosen
from cpulaunch.runtime.settings import training_settings

T = TypeVar("T")

prepared: weakref.WeakSet[Any] = weakref.WeakSet()
_became: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""What was given → what came back, where that is another object."""


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

    ``model, optimizer = cpulaunch.prepare(model, optimizer)``; one object comes back as itself, several as a
    tuple. Every rank has to call it with the same objects. A model gets the engine's bf16 (see ``autocast``),
    rank 0's weights, and data parallelism where there is more than one rank; an optimizer its fused step; a
    data loader its rank's share of the data, shuffled anew in each epoch, in batches of the same size.
    Give a model and its optimizer in one call. What is prepared already comes back as it is.

    ``find_unused_parameters``: for models of which each step uses only a part. ``static_graph``: for models
    that use the same part in each step. ``bucket_mb``: size of DDP's buckets in MB (2²⁰ bytes).
    ``compress_gradients``: ``"none"``, or ``"bf16"`` on the wire and in the sum. None: as planned.

    Raises UsageError for objects of other types, and for data loaders that can't be sharded.
    """
    if not objects:
        raise UsageError("prepare was given nothing: prepare(model, optimizer)")
    for thing in objects:
        if not isinstance(thing, (nn.Module, Optimizer, LRScheduler, DataLoader)):
            raise UsageError(
                f"prepare takes models, optimizers, learning rate schedulers and data loaders, not "
                f"{type(thing).__name__}"
            )
    plan = training_settings()
    compress = plan.compress_gradients if compress_gradients is None else compress_gradients
    if compress not in ("none", "bf16"):
        raise UsageError(f"prepare: compress_gradients is {compress!r}; valid: none, bf16")
    distributed.init()
    fresh = [thing for thing in objects if thing not in prepared and _known(thing) is None]
    models = [m for m in fresh if isinstance(m, nn.Module) and not isinstance(m, DistributedDataParallel)]
    optimizers = [o for o in fresh if isinstance(o, Optimizer)]

    made: dict[int, Any] = dict(_with_engine(models, optimizers))
    alive = []
    for thing in fresh:
        result = made.get(id(thing), thing)
        if isinstance(thing, DataLoader):
            result = loaders.shard(thing)
        elif isinstance(thing, nn.Module) and not isinstance(thing, DistributedDataParallel):
            if not any(parameter.requires_grad for parameter in result.parameters()):
                log_once(f"{type(thing).__name__} has nothing to train: it is left without data parallelism")
                if distributed.world_size() > 1:
                    distributed.broadcast(result)
            elif distributed.world_size() > 1:
                result = distributed.data_parallel(
                    result,
                    find_unused_parameters=find_unused_parameters,
                    static_graph=plan.static_graph if static_graph is None else static_graph,
                    bucket_mb=bucket_mb or plan.bucket_mb,
                    compress=compress == "bf16",
                )
            if plan.compile:
                _compile(result)
            if chosen().bf16:
                result.register_forward_pre_hook(_check_autocast)
        elif isinstance(thing, Optimizer):
            _watch(thing)
        prepared.add(result)
        alive.append(result)
        if result is not thing:
            _became[thing] = weakref.ref(result)
    results = tuple(thing if _known(thing) is None else _known(thing) for thing in objects)
    return results[0] if len(results) == 1 else results


def _known(thing: Any) -> Any:
    """What ``thing`` has become, if it lives."""
    return _became[thing]() if thing in _became else None


def _with_engine(models: list[nn.Module], optimizers: list[Optimizer]) -> Iterator[tuple[int, nn.Module]]:
    """Apply the engine in place; yields models that came back as other objects, by the given one's id."""
    left = list(optimizers)
    for model in models:
        optimizer = next((o for o in left if _parameters(o) & set(model.parameters())), None)
        problem = None
        if chosen().engine == "ipex":
            problem = _problem_for_ipex(model, optimizer, models, left)
            if problem:
                log_once(f"{type(model).__name__} gets the engine native: {problem}")
        if chosen().engine == "ipex" and not problem and optimizer is not None:
            # The bits that a weight's bf16 lacks lie in the optimizer, where DDP would not look.
            if distributed.world_size() > 1:
                distributed.broadcast(model)
            yield id(model), ipex.optimize(model, optimizer)
            left.remove(optimizer)
        else:
            native.optimize_model(model)
    for optimizer in left:
        native.optimize_optimizer(optimizer)


def _problem_for_ipex(
    model: nn.Module, optimizer: Optimizer | None, models: list[nn.Module], optimizers: list[Optimizer]
) -> str | None:
    own = set(model.parameters())
    if optimizer is None:
        return "IPEX needs the optimizer, in the same call of prepare"
    if type(optimizer) not in ipex.FUSED:
        names = ", ".join(kind.__name__ for kind in ipex.FUSED)
        return f"IPEX has no fused step for {type(optimizer).__name__}; it has for {names}"
    if optimizer.state:
        return f"its {type(optimizer).__name__} has a state already: load checkpoints after prepare"
    if sum(bool(_parameters(o) & own) for o in optimizers) > 1:
        return "it has several optimizers"
    if any(other is not model and _parameters(optimizer) & set(other.parameters()) for other in models):
        return f"its {type(optimizer).__name__} is another model's, too"
    return None


def _parameters(optimizer: Optimizer) -> set[torch.Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _compile(model: nn.Module) -> None:
    """Compile in place: names in the state dict stay.  It takes a C++ compiler."""
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


def _watch(optimizer: Optimizer) -> None:
    """Refuse steps with half a gradient, and tell at the end of a training that never stepped."""
    if not any(parameter.requires_grad for parameter in _parameters(optimizer)):
        log_once(f"{type(optimizer).__name__} has nothing to train: none of its parameters wants a gradient")
    stepped: list[bool] = []

    def before(self: Optimizer, *_: Any) -> None:
        check_complete(self)
        if not stepped:
            stepped.append(True)

    optimizer.register_step_pre_hook(before)
    name = type(optimizer).__name__

    def tell() -> None:
        if not stepped and not hasattr(sys, "last_type"):  # a failure has its own message
            log_once(f"{name} was prepared, but never stepped: this script has not trained")

    atexit.register(tell)
