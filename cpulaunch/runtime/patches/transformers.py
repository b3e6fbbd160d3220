"""transformers: its Trainer trains on the CPU, and takes bf16 there."""

from __future__ import annotations

import functools
from typing import Any

from cpulaunch.runtime.patches.base import Change
from cpulaunch.runtime.settings import TrainingSettings

TRIED = ("5.23.0",)


def _use_cpu(training_args: Any, settings: TrainingSettings) -> None:
    """Where there is no GPU, ``TrainingArguments`` refuse bf16 unless ``use_cpu`` is set."""
    original = training_args.TrainingArguments.__post_init__

    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.use_cpu = True
        original(self, *args, **kwargs)

    training_args.TrainingArguments.__post_init__ = __post_init__


CHANGES = (
    Change(
        ("TrainingArguments.__post_init__", "TrainingArguments.use_cpu"),
        "scripts have to choose the CPU themselves, for example by TrainingArguments(use_cpu=True)",
        _use_cpu,
    ),
)
