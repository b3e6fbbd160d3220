"""The user's cache of measured rates of matrix products.  Standard library only.

Each file is for one CPU model and one version of torch.  It contains rates by number of threads in FLOP/s:
``{"14": {"fp32": {"layer": 2.1e12, "best": 2.2e12}, "bf16": …}}``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cpulaunch.model.rates import Cpu, ProductRates
from cpulaunch.user_file import cache_home

INSTRUCTION_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Variables that limit the instructions of torch and its libraries."""


def limits_of_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of INSTRUCTION_LIMITS that ``environ`` sets, with their values."""
    return {name: environ[name] for name in INSTRUCTION_LIMITS if environ.get(name)}


MARK = "cpulaunch-rates: "
"""The prefix of the line with a host's rates.  rc files of the shell may print other lines."""


class Rate(NamedTuple):
    """Rates of one precision in FLOP/s."""

    layer: float  # of all matrix products of a transformer layer together
    best: float  # of the fastest matrix product


@dataclass(frozen=True)
class RateCache:
    """The file for one CPU model, one version of torch, and one set of INSTRUCTION_LIMITS."""

    file: Path

    @classmethod
    def of(cls, cpu: Cpu, torch_version: str, environ: Mapping[str, str]) -> RateCache:
        """``environ`` is the environment of the ranks."""
        key = json.dumps([cpu, torch_version, limits_of_ranks(environ)], sort_keys=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        return cls(cache_home() / "cpulaunch" / "rates" / f"{name}.json")

    def rate(self, threads: int, precision: str) -> Rate | None:
        """The rates with ``threads`` threads in ``precision``, such as ``"bf16"``; None if not measured."""
        try:
            row = self._read()[str(threads)][precision]
            return Rate(float(row["layer"]), float(row["best"]))
        except (KeyError, TypeError, ValueError):
            return None

    def product_rates(self) -> tuple[ProductRates, ...]:
        """The rates for each number of threads with which both fp32 and bf16 were measured."""
        found = []
        for threads, row in self._read().items():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                layer = {name: row[name]["layer"] for name in ("fp32", "bf16")}
                found.append(ProductRates.from_json({"threads": threads, **layer}))
        return tuple(found)

    def keep(self, threads: int, rates: Mapping[str, Rate]) -> None:
        """Add ``rates``, by precision, to the file.  Does nothing if the cache can't be written."""
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            known = self._read()
            row = known.setdefault(str(threads), {})
            row.update({name: rate._asdict() for name, rate in rates.items()})
            part = self.file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(known))
            part.replace(self.file)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the file, if possible, so that only one process measures at a time."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(self.file.with_suffix(".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}
