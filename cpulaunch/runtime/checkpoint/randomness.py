"""Random states: those of torch, NumPy and Python, and the generators of a data loader."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from typing import Any

import torch

State = dict[str, Any]


def capture(loader: Any) -> State:
    """All random states that this process draws from, those of ``loader`` included."""
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state() if numpy else None,
        "generators": [generator.get_state() for generator in _generators(loader)],
    }


def restore(state: State, loader: Any) -> None:
    """Draw from here on what was drawn after ``capture``."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if state["numpy"] is not None:
        import_module("numpy").random.set_state(state["numpy"])
    for generator, own in zip(_generators(loader), state["generators"], strict=False):
        generator.set_state(own)


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader, its sampler and its batch sampler were given, each once."""
    places = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [getattr(place, "generator", None) for place in places]
    return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))
