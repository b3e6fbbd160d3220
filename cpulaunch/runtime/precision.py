"""Which engine does bf16 here, and why."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings, training_settings

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Flags of /proc/cpuinfo, best first; the last is ARM's."""


@dataclass(frozen=True)
class Measured:
    """A step with ipex ÷ a step with native, on one CPU and one torch: below 1, ipex is faster."""

    flag: str  # the best of BF16_FLAGS that the CPU has
    torch: str
    ratio: float
    source: str


# What `auto` goes by.  A new row is a new run of scripts/bench/training.py.
MEASURED: tuple[Measured, ...] = (
    Measured("amx_bf16", "2.8", 0.93, "BERT of 4 layers on one core, docs/performance.md"),
)

WORTH_IT = 0.8
"""The ratio below which ``auto`` takes ipex.  A small gain is not worth it: with IPEX, whose weights are in
bf16, averaged gradients are rounded to bf16; with native they are in fp32."""


@dataclass(frozen=True)
class Choice:
    """An engine ("native" or "ipex"), a precision ("bf16" or "fp32"), and why, in one line."""

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
    """The choice for this process.  Says it, once."""
    choice = choose(training_settings(), cpu_flags(), torch.__version__, ipex_version())
    # What a rank's own CPU lacks is worth a line of each such rank.
    log_once(str(choice), every_rank=not cpu_flags())
    return choice


def choose(plan: TrainingSettings, flags: Collection[str], torch_version: str, ipex: str | None) -> Choice:
    """The engine for ``plan`` on a CPU with ``flags`` (of BF16_FLAGS); ``ipex`` is its version, if any."""
    if plan.precision == "fp32":
        return Choice("native", "fp32", "as planned" if plan.in_job else "CPULAUNCH_PRECISION says so")
    best = next((flag for flag in BF16_FLAGS if flag in flags), None)
    if best is None and plan.engine == "auto":
        return Choice("native", "fp32", "this CPU has no instructions for bf16 (amx_bf16, avx512_bf16)")
    if plan.engine == "native":
        slow = (
            ", though this CPU has no instructions for bf16: it is slower than fp32" if best is None else ""
        )
        return Choice("native", "bf16", f"as asked{slow}")
    problem = ipex_problem(ipex, torch_version)
    if problem is None and best in (None, "bf16"):
        problem = "IPEX does bf16 on CPUs with avx512 only"
    if plan.engine == "ipex":
        return (
            Choice("native", "bf16", problem) if problem else Choice("ipex", "bf16", f"as asked, IPEX {ipex}")
        )
    if problem:
        return Choice("native", "bf16", f"{best}; {problem}" if ipex else str(best))
    for row in MEASURED:
        if (row.flag, row.torch) == (best, _series(torch_version)):
            speed = f"with {best} and torch {row.torch} a step of ipex takes {row.ratio:.2f} x native's"
            return Choice("ipex" if row.ratio < WORTH_IT else "native", "bf16", f"{speed} ({row.source})")
    return Choice("native", "bf16", f"{best}; nobody has measured ipex with it and torch {torch_version}")


def autocast(enabled: bool = True) -> Any:
    """The context of a forward pass, loss included: bf16 autocast where bf16 is the precision, else nothing.

    Parameters stay in fp32 (with the engine ipex: in bf16, and the missing bits in the optimizer); matrix
    products and convolutions run in bf16; what needs more range or precision, such as losses and
    normalisations, is left in fp32 by torch.
    """
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled and chosen().bf16)


@lru_cache(1)
def cpu_flags() -> tuple[str, ...]:
    """Those of BF16_FLAGS that this CPU has."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    words = set(found[1].split()) if found else set()
    return tuple(flag for flag in BF16_FLAGS if flag in words)


def ipex_version() -> str | None:
    """The installed IPEX's version, without importing it: with another torch, it ends the process."""
    try:
        return metadata.version("intel_extension_for_pytorch")
    except metadata.PackageNotFoundError:
        return None


def ipex_problem(ipex: str | None, torch_version: str) -> str | None:
    """Why this IPEX can't be used with this torch; None where it can."""
    if ipex is None:
        return "IPEX is not installed (it wants an environment of its own, with torch 2.8)"
    if _series(ipex) != _series(torch_version):
        return (
            f"IPEX {ipex} is for torch {_series(ipex)}.*, and this is torch {torch_version} "
            "(an environment of its own, with cpulaunch's extra `intel`, has a pair that fits)"
        )
    return None


def _series(version: str) -> str:
    """``"2.13"`` for ``"2.13.0+cpu"``."""
    return ".".join(re.findall(r"\d+", version)[:2])
