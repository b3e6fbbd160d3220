"""Decides the precision and the engine of a training step, with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from cpulaunch import plugins, variables
from cpulaunch.discovery.host.this_host import cpu_flags, cpu_here
from cpulaunch.model.hosts import LOCALHOST
from cpulaunch.model.rates import ProductRates
from cpulaunch.plan.training import HostSpeed, PrecisionDecision, decide_precision
from cpulaunch.runtime.change import engines
from cpulaunch.runtime.change.engines.base import Engine
from cpulaunch.runtime.change.engines.native import OF_TORCH
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.product_rates import product_rates
from cpulaunch.runtime.settings import TrainingSettings, training_settings

WORTH_IT = 0.8
"""The ratio to native's time below which ``auto`` chooses another engine.  A small gain is not worth a loss
of precision: native averages gradients in fp32, an engine with bf16 weights rounds them to bf16."""

Flags = tuple[str, ...] | None
"""``HostFacts.cpu_flags``: the CPU's flags for bf16, best first; None if they are unknown."""


@dataclass(frozen=True)
class Choice:
    """The name of an engine, a precision ("bf16" or "fp32"), and the reason in one line."""

    engine: str
    precision: str
    why: str

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16"

    def __str__(self) -> str:
        return f"{self.precision}, engine {self.engine}: {self.why}"


_kept: str | None = None  # the precision of the checkpoint that this training resumed from


_agreed: ProductRates | None = None  # rank 0's, if ranks without a plan have agreed on them


def agree() -> None:
    """Have ranks without a plan decide by rank 0's rates, as all have to train in one precision.

    All ranks call this, once there is a process group.
    """
    global _agreed
    if _agreed is None and (_kept or training_settings().precision) is None and dist.get_world_size() > 1:
        measured = [product_rates(torch) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(measured, src=0)
        _agreed = measured[0]


@lru_cache(1)
def chosen() -> Choice:
    """Return the choice for this process, which is logged once."""
    settings, flags = training_settings(), cpu_flags()
    settings = replace(settings, precision=_kept or settings.precision)
    rates = _agreed or product_rates(torch) if settings.precision is None else None
    choice = choose(settings, flags, torch.__version__, rates=rates)
    # Ranks that have not agreed decide by their own CPUs, so each that departs from the default logs it.
    alone = settings.precision is None and _agreed is None
    log_once(str(choice), every_rank=alone and not choice.bf16)
    check_precision(settings, flags)
    return choice


def choose(
    settings: TrainingSettings,
    flags: Flags,
    torch_version: str,
    load: Callable[[str], Engine] = engines.load,
    rates: ProductRates | None = None,
) -> Choice:
    """Choose precision and engine for ``settings`` on a CPU with ``flags`` and, if measured, ``rates``.

    ``load`` returns an engine by its name.
    """
    decision = rank_precision(settings, flags, rates)
    precision, why = decision.precision, decision.why
    if settings.precision is not None:
        why = "as planned" if settings.in_job else f"{variables.PRECISION} says so"
    if precision == "fp32":
        return Choice("torch" if settings.engine == "torch" else "native", "fp32", why)
    if settings.engine == "auto":
        return _fastest_engine(flags, torch_version, load, why)
    engine = load(settings.engine)
    if problem := engine.unavailable(torch_version, flags):
        return Choice("native", "bf16", problem)
    version = engine.version() if engine.name not in OF_TORCH else ""
    return Choice(settings.engine, "bf16", f"as asked, version {version}" if version else "as asked")


def _fastest_engine(flags: Flags, torch_version: str, load: Callable[[str], Engine], why: str) -> Choice:
    """Choose the engine that was measured to be much faster than native on this kind of CPU, else native."""
    best = flags[0] if flags else None
    reasons = [why]
    for name in plugins.BUILT_IN[plugins.ENGINES]:
        if name in OF_TORCH or (engine := load(name)).version() is None:
            continue
        if problem := engine.unavailable(torch_version, flags):
            reasons.append(problem)
            continue
        series = ".".join(re.findall(r"\d+", torch_version)[:2])
        row = next((r for r in engine.measured if (r.cpu_flag, r.torch) == (best, series)), None)
        if row is None:
            reasons.append(f"{name} has not been measured with it and torch {torch_version}")
            continue
        reasons.append(
            f"a step of {name} takes {row.ratio:.2f} x native's with torch {series} ({row.source})"
        )
        if row.ratio < WORTH_IT:
            return Choice(name, "bf16", "; ".join(reasons))
    return Choice("native", "bf16", "; ".join(reasons))


def rank_precision(
    settings: TrainingSettings, flags: Flags, rates: ProductRates | None = None
) -> PrecisionDecision:
    """Decide this rank's precision, by the same function as the planner.

    A rank of a job computes in the planned precision, whatever its CPU: what the plan shows is what runs, the
    same on all ranks.  Its own CPU counts only if there is no plan and nobody has set the precision.
    """
    return decide_precision(settings.precision or "auto", [HostSpeed(LOCALHOST, cpu_here(), flags, rates)])


def current_precision(settings: TrainingSettings) -> str | None:
    """Return the precision of this training; None if nobody has chosen one yet."""
    decided = chosen().precision if chosen.cache_info().currsize else settings.precision
    return _kept or decided


def keep_precision(saved: str, settings: TrainingSettings) -> None:
    """Go on in the precision of a checkpoint, unless the user has chosen another one.

    With another precision, the training would differ from the one that was interrupted.
    """
    global _kept
    now = current_precision(settings)
    if now == saved:
        return
    is_users = settings.precision is not None and not settings.precision_is_planned
    if is_users or (now == "bf16" and chosen().engine not in OF_TORCH):  # it has changed the weights
        log_once(f"the checkpoint was saved in {saved}, and this job computes in {now}")
        return
    _kept = saved
    chosen.cache_clear()
    log_once(f"precision {saved}, as in the job that saved the checkpoint")


def check_precision(settings: TrainingSettings, flags: Flags) -> None:
    """Warn, on each rank concerned, if bf16 runs on a CPU without instructions for it."""
    if warning := rank_precision(settings, flags).warning:
        log_once(f"warning: {warning}", every_rank=True)


def autocast(enabled: bool = True) -> Any:
    """Return the context of a forward pass and its loss: bf16 autocast if that is the precision.

    Parameters stay in fp32 (unless the engine splits them into bf16 and the missing bits).  Matrix products
    and convolutions run in bf16.  torch keeps operations that need more range or precision in fp32, such as
    losses and normalisations.
    """
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled and chosen().bf16)
