"""Saves and restores the random states of torch, NumPy, Python and a data loader's generators."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from typing import Any

import torch

State = dict[str, Any]


def capture(loader: Any) -> State:
    """Return all random states of this process and of ``loader``."""
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state() if numpy else None,
        "generators": [generator.get_state() for generator in _generators(loader)],
    }


def restore(state: State, loader: Any) -> None:
    """Restore the states that ``capture`` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if state["numpy"] is not None:
        import_module("numpy").random.set_state(state["numpy"])
    for generator, own in zip(_generators(loader), state["generators"], strict=False):
        generator.set_state(own)


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader, its sampler and its batch sampler, each once."""
    parts = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [getattr(part, "generator", None) for part in parts]
    return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))
