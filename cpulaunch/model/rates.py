"""Which CPU a host has, and how fast it multiplies matrices: values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Cpu(NamedTuple):
    """A model of CPU, in the words of ``/proc/cpuinfo``; empty where it says nothing."""

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
        """Raises KeyError, TypeError or ValueError for anything that ``_asdict`` did not give."""
        rates = cls(int(raw["threads"]), float(raw["fp32"]), float(raw["bf16"]))
        if min(rates) <= 0:
            raise ValueError(f"rates are positive numbers, not {dict(raw)}")
        return rates
