"""The precision of a training step, the engine that does it, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from cpulaunch import variables
from cpulaunch.runtime import engines
from cpulaunch.runtime.engines.base import Engine
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings, training_settings

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Flags of /proc/cpuinfo, best first; the last is Arm's."""

WORTH_IT = 0.8
"""The ratio to native's time below which ``auto`` takes another engine.  A small gain is not worth a loss of
precision: native averages gradients in fp32, an engine whose weights are in bf16 rounds them to bf16."""


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
    settings = training_settings()
    choice = choose(settings, cpu_flags(), torch.__version__)
    # Ranks without a plan decide by their own CPUs, so each one that departs from bf16 says so.
    log_once(str(choice), every_rank=settings.precision is None and not choice.bf16)
    warn_if_slow(choice.precision, cpu_flags())
    return choice


def choose(
    settings: TrainingSettings,
    flags: Collection[str] | None,
    torch_version: str,
    load: Callable[[str], Engine] = engines.load,
) -> Choice:
    """The precision and the engine for ``settings`` on a CPU with ``flags`` (of BF16_FLAGS; None: unknown).

    ``load`` gives an engine by its name.
    """
    precision, why = decided_precision(settings, flags)
    if precision == "fp32":
        return Choice("native", "fp32", why)
    if settings.engine != "auto":
        engine = load(settings.engine)
        if problem := engine.unavailable(torch_version, flags):
            return Choice("native", "bf16", problem)
        version = "" if settings.engine == "native" else f", version {engine.version()}"
        return Choice(settings.engine, "bf16", f"as asked{version}")
    best = next((flag for flag in BF16_FLAGS if flag in (flags or ())), None)
    reasons = [best or why]
    for name in engines.BUILT_IN:
        engine = load(name)
        if name == "native" or engine.version() is None:
            continue
        if problem := engine.unavailable(torch_version, flags):
            reasons.append(problem)
            continue
        row = next(
            (r for r in engine.measured if r.cpu_flag == best and _in_series(torch_version, r.torch)), None
        )
        if row is None:
            reasons.append(f"nobody has measured {name} with it and torch {torch_version}")
            continue
        reasons.append(
            f"a step of {name} takes {row.ratio:.2f} x native's with torch {row.torch} ({row.source})"
        )
        if row.ratio < WORTH_IT:
            return Choice(name, "bf16", "; ".join(reasons))
    return Choice("native", "bf16", "; ".join(reasons))


def decided_precision(settings: TrainingSettings, flags: Collection[str] | None) -> tuple[str, str]:
    """The precision of this rank, and the reason.

    A rank of a job computes in what was planned, whatever its CPU: all ranks do the same, and what the plan
    shows is what runs.
    """
    if settings.precision is not None:
        return settings.precision, "as planned" if settings.in_job else f"{variables.PRECISION} says so"
    if flags is not None and not flags:
        return "fp32", f"this CPU has no instructions for bf16 ({', '.join(BF16_FLAGS[:2])})"
    return "bf16", "the default"


def warn_if_slow(precision: str, flags: Collection[str] | None) -> None:
    """Log a warning, on each rank that it concerns, where bf16 runs on a CPU without instructions for it."""
    if precision == "bf16" and flags is not None and not flags:
        log_once(
            "warning: bf16 is slower than fp32 on this rank, as its CPU has no instructions for bf16 "
            f"({', '.join(BF16_FLAGS[:2])})",
            every_rank=True,
        )


def autocast(enabled: bool = True) -> Any:
    """The context of a forward pass and its loss: bf16 autocast where bf16 is the precision, else nothing.

    Parameters stay in fp32 (unless the engine splits them into bf16 and the missing bits); matrix products
    and convolutions run in bf16; what needs more range or precision, such as losses and normalisations, is
    left in fp32 by torch.
    """
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled and chosen().bf16)


@lru_cache(1)
def cpu_flags() -> tuple[str, ...] | None:
    """Those of BF16_FLAGS that this CPU has; None where /proc/cpuinfo doesn't say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    words = found[1].split() if found else []
    return tuple(flag for flag in BF16_FLAGS if flag in words) if found else None


def _in_series(version: str, series: str) -> bool:
    """Whether ``"2.8.0+cpu"`` is of the series ``"2.8"``."""
    return re.findall(r"\d+", version)[:2] == series.split(".")
