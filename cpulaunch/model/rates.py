"""The model of a host's CPUs, and the measured rate of their matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Cpu(NamedTuple):
    """A CPU model as in ``/proc/cpuinfo``; fields that the file lacks are empty."""

    vendor: str = ""
    name: str = ""
    family: str = ""
    model: str = ""
    stepping: str = ""
    microcode: str = ""


class ProductRates(NamedTuple):
    """FLOP/s of ``threads`` threads in the matrix products of a transformer layer, by precision."""

    threads: int
    fp32: float
    bf16: float

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ProductRates:
        """Undo ``_asdict``.  Raises KeyError, TypeError or ValueError for other data."""
        rates = cls(int(raw["threads"]), float(raw["fp32"]), float(raw["bf16"]))
        if min(rates) <= 0:
            raise ValueError(f"rates must be positive, got {dict(raw)}")
        return rates
