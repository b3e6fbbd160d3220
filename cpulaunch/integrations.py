"""One line that gives an engine to scripts in which a library runs the training loop."""

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

    This is what ``TrainingArguments(use_ipex=True, bf16=True)`` gave before transformers 5. The weights of a
    model are split into bf16 and the missing bits before DDP sees them, together with its optimizer, and
    AdamW has its fused step. Returns ``target``. If IPEX can't be used, ``target`` trains as before, and one
    log line gives the reason. Raises UsageError for other objects, and if the precision is not bf16.
    """
    accelerator: Any = getattr(target, "accelerator", target)
    if not hasattr(accelerator, "prepare") or not hasattr(accelerator, "mixed_precision"):
        raise UsageError(f"use_ipex takes an Accelerator or a Trainer, not {type(target).__name__}")
    engine = engines.load("ipex")
    problem = engine.unavailable(
        torch.__version__, None
    )  # flags of the CPU don't matter: the user named IPEX
    if not problem and getattr(accelerator.state, "fsdp_plugin", None) is not None:
        problem = "it can't be combined with FSDP"
    if problem:
        log_once(f"training goes on without IPEX: {problem}")
        return target
    if accelerator.mixed_precision != "bf16":
        raise UsageError(
            f"use_ipex trains in bf16, but the precision is {accelerator.mixed_precision}: say "
            "Accelerator(mixed_precision='bf16') or TrainingArguments(bf16=True)"
        )
    original = accelerator.prepare

    @functools.wraps(original)
    def prepare(*objects: Any, **options: Any) -> Any:
        return original(*_with_engine(engine, objects), **options)

    accelerator.prepare = prepare
    return target


def _with_engine(engine: Engine, objects: tuple[Any, ...]) -> list[Any]:
    """Return ``objects`` after the engine has prepared their only model and their only optimizer."""
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
        log_once(f"training goes on without IPEX: {problem}")
        return list(objects)
    if engine.broadcast_first and distributed.world_size() > 1:
        distributed.broadcast(models[0])
    model = engine.apply(models[0], optimizers[0])
    return [model if thing is models[0] else thing for thing in objects]
