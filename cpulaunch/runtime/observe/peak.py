"""What this rank's cores reach while all ranks of the host compute: the fastest of some matrix products.

It takes ``LIMIT`` once, and is kept in the user's cache for the same CPU, cores, ranks, precision and torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

LIMIT = 0.3
"""Seconds that it takes, roughly."""

SIZES = (512, 1024, 2048, 4096)
"""Of the square matrices: the first one that takes ``LONG_ENOUGH``, or the last."""

LONG_ENOUGH = 0.01

_MODEL = ("vendor_id", "model name", "cpu family", "model", "stepping", "CPU implementer", "CPU part")
"""What tells models of CPUs apart in ``/proc/cpuinfo`` (x86, aarch64)."""


def peak_of_this_rank(torch: Any, dtype: Any) -> float:
    """FLOP/s in ``dtype``, from the cache, or else measured now."""
    file = _cache_file(torch, dtype)
    try:
        return float(json.loads(file.read_text())["peak_flops"])
    except (OSError, ValueError, KeyError, TypeError):
        peak = measure(torch, dtype)
        _keep(file, peak)
        return peak


def measure(torch: Any, dtype: Any) -> float:
    """FLOP/s of the fastest product of two square matrices in ``LIMIT`` seconds."""
    until = time.perf_counter() + LIMIT
    best = 0.0
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for size in SIZES:
            # Constants, as random numbers would be other ones for the script.
            a, b = (torch.full((size, size), value, dtype=dtype) for value in (0.5, 0.25))
            out = torch.mm(a, b)  # which also prepares what is needed once
            while True:
                began = time.perf_counter()
                torch.mm(a, b, out=out)
                now = time.perf_counter()
                best = max(best, 2 * size**3 / (now - began))
                if now >= until:
                    return best
                if now - began < LONG_ENOUGH and size != SIZES[-1]:
                    break
    return best


def _cache_file(torch: Any, dtype: Any) -> Path:
    key = (
        _cpu_model(),
        sorted(os.sched_getaffinity(0)),
        os.environ.get("LOCAL_WORLD_SIZE", "1"),
        str(dtype),
        str(torch.get_num_threads()),
        torch.__version__,
        os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
    )
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cpulaunch" / "peak" / f"{name}.json"


def _cpu_model() -> list[str]:
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return []
    pairs = (line.partition(":") for line in first.splitlines())
    return [value.strip() for name, _, value in pairs if name.strip() in _MODEL]


def _keep(file: Path, peak: float) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"peak_flops": peak}))
        part.replace(file)
    except OSError:
        pass  # without a cache, the next job measures again
