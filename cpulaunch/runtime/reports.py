"""Reports about checkpoints to this rank's agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cpulaunch.messages import Resumes, Saves, SavesAt
from cpulaunch.wire import encode

report: Callable[[bytes], object] | None = None
"""Writes a line to this rank's agent; the bootstrap sets it.  None outside of a job."""

resumed_step = 0
"""The step that this rank resumed from; 0 if it started from the beginning."""


def resumed_from(step: int) -> None:
    """Report that this rank has loaded the checkpoint of ``step``; 0 if there was none.

    A rank that resumes must call this before its first step.
    """
    global resumed_step
    resumed_step = step
    if report is not None:
        report(encode(Resumes(step)))


def saved(step: int, *, leaving: bool = False) -> None:
    """Report that the checkpoint after ``step`` optimizer steps is on disk.

    ``leaving``: this rank ends now because of a signal.
    """
    if report is not None:
        report(encode(Saves(step, leaving)))


def saves_at(signals: Iterable[int]) -> None:
    """Report at which signals this rank saves a checkpoint from now on."""
    if report is not None:
        report(encode(SavesAt([int(number) for number in signals])))
