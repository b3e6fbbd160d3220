"""A host's CPU and the rate at which it multiplies matrices, as values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Cpu(NamedTuple):
    """A CPU model, in the words of ``/proc/cpuinfo``; empty if the file doesn't name it."""

    vendor: str = ""
    name: str = ""
    family: str = ""
    model: str = ""
    stepping: str = ""
    microcode: str = ""


class ProductRates(NamedTuple):
    """The rate of matrix products in the shapes of a transformer layer, in FLOP/s, by ``threads`` threads."""

    threads: int
    fp32: float
    bf16: float

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ProductRates:
        """Undo ``_asdict``.  Raises KeyError, TypeError or ValueError for anything else."""
        rates = cls(int(raw["threads"]), float(raw["fp32"]), float(raw["bf16"]))
        if min(rates) <= 0:
            raise ValueError(f"rates are positive numbers, not {dict(raw)}")
        return rates
