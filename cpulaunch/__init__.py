"""cpulaunch: run PyTorch training on CPU clusters.

In a training script::

    import cpulaunch

    cpulaunch.init()
    model, optimizer, loader = cpulaunch.prepare(model, optimizer, loader)
    for x, y in loader:
        with cpulaunch.autocast():
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

Importing this package is cheap and does not import torch, which the launcher and the agent don't need.  The
names below are imported when they are first used.
"""

from __future__ import annotations

__version__ = "0.2.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cpulaunch.runtime.accumulate import accumulate
    from cpulaunch.runtime.change.precision import autocast
    from cpulaunch.runtime.checkpoint.checkpoint import Checkpoint
    from cpulaunch.runtime.distributed import backend, init, is_main, rank, unwrap, world_size
    from cpulaunch.runtime.instances import metric, shard
    from cpulaunch.runtime.observe.telemetry import log
    from cpulaunch.runtime.prepare import prepare

__all__ = [
    "Checkpoint",
    "accumulate",
    "autocast",
    "backend",
    "init",
    "is_main",
    "log",
    "metric",
    "prepare",
    "rank",
    "shard",
    "unwrap",
    "world_size",
]

_HOMES = {
    "Checkpoint": "checkpoint.checkpoint",
    "accumulate": "accumulate",
    "autocast": "change.precision",
    "backend": "distributed",
    "init": "distributed",
    "is_main": "distributed",
    "log": "observe.telemetry",
    "metric": "instances",
    "prepare": "prepare",
    "rank": "distributed",
    "shard": "instances",
    "unwrap": "distributed",
    "world_size": "distributed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"cpulaunch.runtime.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
