"""Chooses the precision and the engine of training steps."""

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
"""``auto`` chooses another engine than native if its step time divided by native's is below this.  A smaller
gain doesn't justify bf16 weights, with which gradients are averaged in bf16."""

Flags = tuple[str, ...] | None
"""``HostFacts.cpu_flags``: the CPU's flags for bf16, the best first; None if they are unknown."""


@dataclass(frozen=True)
class Choice:
    """An engine's name, a precision (bf16 or fp32), and the reason in one line."""

    engine: str
    precision: str
    why: str

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16"

    def __str__(self) -> str:
        return f"{self.precision}, engine {self.engine}: {self.why}"


_resumed: str | None = None  # the precision of the checkpoint from which this training resumed
_shared: ProductRates | None = None  # rank 0's rates, after `share_rates`


def share_rates() -> None:
    """Broadcast rank 0's rates if there is no plan, so that all ranks choose the same precision.

    Every rank must call this, after the default process group was created.
    """
    global _shared
    if _shared is None and (_resumed or training_settings().precision) is None and dist.get_world_size() > 1:
        measured = [product_rates(torch) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(measured, src=0)
        _shared = measured[0]


@lru_cache(1)
def choice() -> Choice:
    """Return this process's precision and engine, which the first call chooses and logs."""
    settings, flags = training_settings(), cpu_flags()
    settings = replace(settings, precision=_resumed or settings.precision)
    rates = _shared or product_rates(torch) if settings.precision is None else None
    result = choose(settings, flags, torch.__version__, rates=rates)
    # Without shared rates, ranks may choose differently, so each rank with fp32 logs its choice.
    own_rates = settings.precision is None and _shared is None
    log_once(str(result), every_rank=own_rates and not result.bf16)
    check_precision(settings, flags)
    return result


def choose(
    settings: TrainingSettings,
    flags: Flags,
    torch_version: str,
    load: Callable[[str], Engine] = engines.load,
    rates: ProductRates | None = None,
) -> Choice:
    """Choose precision and engine on a CPU with these flags and measured rates, or None.

    ``load`` returns an engine by its name.
    """
    decision = rank_precision(settings, flags, rates)
    precision, why = decision.precision, decision.why
    if settings.precision is not None:
        why = "as planned" if settings.in_job else f"{variables.PRECISION} is set"
    if precision == "fp32":
        return Choice("torch" if settings.engine == "torch" else "native", "fp32", why)
    if settings.engine == "auto":
        return _fastest_engine(flags, torch_version, load, why)
    engine = load(settings.engine)
    if problem := engine.unavailable(torch_version, flags):
        return Choice("native", "bf16", problem)
    version = engine.version() if engine.name not in OF_TORCH else ""
    return Choice(settings.engine, "bf16", f"as requested, version {version}" if version else "as requested")


def _fastest_engine(flags: Flags, torch_version: str, load: Callable[[str], Engine], why: str) -> Choice:
    """Choose an engine that was measured to be much faster than native on such a CPU; else native."""
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
    """Return this rank's precision: the planned precision or, without one, the best for this rank's CPU."""
    return decide_precision(settings.precision or "auto", [HostSpeed(LOCALHOST, cpu_here(), flags, rates)])


def current_precision(settings: TrainingSettings) -> str | None:
    """Return the precision of this training; None if it was not chosen yet."""
    return _resumed or (choice().precision if choice.cache_info().currsize else settings.precision)


def keep_precision(saved: str, settings: TrainingSettings) -> None:
    """Continue in the precision of a checkpoint, unless the user has chosen another one."""
    global _resumed
    now = current_precision(settings)
    if now == saved:
        return
    is_users = settings.precision is not None and not settings.precision_is_planned
    if is_users or (now == "bf16" and choice().engine not in OF_TORCH):  # the engine has changed the weights
        log_once(f"the checkpoint was saved in {saved}, and this job computes in {now}")
        return
    _resumed = saved
    choice.cache_clear()
    log_once(f"precision {saved}, as in the job that saved the checkpoint")


def check_precision(settings: TrainingSettings, flags: Flags) -> None:
    """Warn if this rank computes in bf16 on a CPU without instructions for it."""
    if warning := rank_precision(settings, flags).warning:
        log_once(f"warning: {warning}", every_rank=True)


def autocast(enabled: bool = True) -> Any:
    """Return the context for a forward pass and its loss: bf16 autocast if the precision is bf16.

    Matrix products and convolutions run in bf16, and operations that need more precision in fp32, such as
    losses and normalizations.  Parameters stay in fp32, except with the engine ipex.
    """
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled and choice().bf16)
