"""Engines for scripts in which accelerate or transformers runs the training loop."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from cpulaunch.errors import UsageError
from cpulaunch.runtime import distributed
from cpulaunch.runtime.change import engines
from cpulaunch.runtime.change.engines.base import Engine
from cpulaunch.runtime.log import log_once

T = TypeVar("T")


def use_ipex(target: T) -> T:
    """Let accelerate's ``Accelerator``, or a ``Trainer`` of transformers, train with IPEX in bf16::

        trainer = cpulaunch.integrations.use_ipex(Trainer(…))

    It replaces ``TrainingArguments(use_ipex=True, bf16=True)`` of transformers before version 5.  IPEX splits
    the model's weights into bf16 and the remaining bits before DDP wraps the model, and AdamW gets a fused
    step.  Returns ``target``.  If IPEX can't be used, ``target`` trains without it, and a log line gives the
    reason.  Raises UsageError for other objects, and if the precision is not bf16.
    """
    accelerator: Any = getattr(target, "accelerator", target)
    if not hasattr(accelerator, "prepare") or not hasattr(accelerator, "mixed_precision"):
        raise UsageError(f"use_ipex takes an Accelerator or a Trainer, not {type(target).__name__}")
    engine = engines.load("ipex")
    problem = engine.unavailable(torch.__version__, None)
    if not problem and getattr(accelerator.state, "fsdp_plugin", None) is not None:
        problem = "it can't be combined with FSDP"
    if problem:
        log_once(f"training continues without IPEX: {problem}")
        return target
    if accelerator.mixed_precision != "bf16":
        raise UsageError(
            f"use_ipex trains in bf16, but the precision is {accelerator.mixed_precision}: use "
            "Accelerator(mixed_precision='bf16') or TrainingArguments(bf16=True)"
        )
    original = accelerator.prepare

    @functools.wraps(original)
    def prepare(*objects: Any, **options: Any) -> Any:
        return original(*_with_engine(engine, objects), **options)

    accelerator.prepare = prepare
    return target


def _with_engine(engine: Engine, objects: tuple[Any, ...]) -> list[Any]:
    """Apply the engine to the only model and the only optimizer in ``objects``, and return all objects."""
    models = [thing for thing in objects if isinstance(thing, nn.Module)]
    optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
    if not models:
        return list(objects)
    if len(models) != 1 or len(optimizers) != 1:
        found = ", ".join(type(thing).__name__ for thing in (*models, *optimizers))
        problem: str | None = f"it takes one model with its optimizer; here are {found}"
    else:
        problem = engine.problem(models[0], optimizers[0])
    if problem:
        log_once(f"training continues without IPEX: {problem}")
        return list(objects)
    if engine.broadcast_first and distributed.world_size() > 1:
        distributed.broadcast(models[0])
    model = engine.apply(models[0], optimizers[0])
    return [model if thing is models[0] else thing for thing in objects]
