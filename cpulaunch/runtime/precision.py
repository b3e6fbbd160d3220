"""The precision of a training step, the engine that does it, and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cpulaunch import plugins, variables
from cpulaunch.config.settings import Table
from cpulaunch.discovery.this_host import cpu_flags
from cpulaunch.plan.training import PrecisionDecision, decide_precision
from cpulaunch.runtime import engines
from cpulaunch.runtime.engines.base import Engine
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings, training_settings

WORTH_IT = 0.8
"""The ratio to native's time below which ``auto`` takes another engine.  A small gain is not worth a loss of
precision: native averages gradients in fp32, an engine whose weights are in bf16 rounds them to bf16."""

Flags = tuple[str, ...] | None
"""``HostFacts.cpu_flags``: the CPU's flags for bf16, best first; None where they are not known."""


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


@lru_cache(1)
def chosen() -> Choice:
    """The choice for this process, which is logged once."""
    settings, flags = training_settings(), cpu_flags()
    choice = choose(settings, flags, torch.__version__)
    # Ranks without a plan decide by their own CPUs, so each one that departs from the default says so.
    log_once(str(choice), every_rank=settings.precision is None and not choice.bf16)
    check_precision(settings, flags)
    return choice


def choose(
    settings: TrainingSettings, flags: Flags, torch_version: str, load: Callable[[str], Engine] = engines.load
) -> Choice:
    """The precision and the engine for ``settings`` on a CPU with ``flags``; ``load`` gives an engine."""
    precision, note = rank_precision(settings, flags)
    if settings.precision is not None:
        why = "as planned" if settings.in_job else f"{variables.PRECISION} says so"
    else:
        why = note or "the default"
    if precision == "fp32":
        return Choice("native", "fp32", why)
    if settings.engine == "auto":
        return _fastest_engine(flags, torch_version, load, why)
    engine = load(settings.engine)
    if problem := engine.unavailable(torch_version, flags):
        return Choice("native", "bf16", problem)
    version = engine.version() if engine.name != "native" else ""
    return Choice(settings.engine, "bf16", f"as asked, version {version}" if version else "as asked")


def _fastest_engine(flags: Flags, torch_version: str, load: Callable[[str], Engine], why: str) -> Choice:
    """The engine that was measured to be much faster than native on such a CPU, else native."""
    best = flags[0] if flags else None
    reasons = [best or why]
    for name in plugins.BUILT_IN[plugins.ENGINES]:
        engine = load(name)
        if name == "native" or engine.version() is None:
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


def rank_precision(settings: TrainingSettings, flags: Flags) -> PrecisionDecision:
    """The precision of this rank, by the function that the planner decides by.

    A rank of a job computes in what was planned, whatever its CPU: what the plan shows is what runs, and all
    ranks do the same.  Its own CPU counts only where there is no plan, and nobody has set the precision.
    """
    return decide_precision(
        settings.precision or Table.training.precision.default,
        is_set=settings.precision is not None,
        lacking=["localhost"] if flags == () else [],
    )


def check_precision(settings: TrainingSettings, flags: Flags) -> None:
    """Log a warning, on each rank that it concerns, where bf16 runs on a CPU without instructions for it."""
    precision, note = rank_precision(settings, flags)
    if precision == "bf16" and note:
        log_once(f"warning: {note}", every_rank=True)


def autocast(enabled: bool = True) -> Any:
    """The context of a forward pass and its loss: bf16 autocast where bf16 is the precision, else nothing.

    Parameters stay in fp32 (unless the engine splits them into bf16 and the missing bits); matrix products
    and convolutions run in bf16; what needs more range or precision, such as losses and normalisations, is
    left in fp32 by torch.
    """
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled and chosen().bf16)
