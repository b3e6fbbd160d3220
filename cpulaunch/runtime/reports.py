"""Reports to the agent the state that this rank resumes from or has saved, and the signals it saves at."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cpulaunch.messages import Resumes, Saves, SavesAt
from cpulaunch.wire import encode

report: Callable[[bytes], object] | None = None
"""Writes a line to this rank's agent; the bootstrap sets it when this module is loaded."""

resumed_step = 0
"""The step that this rank resumed from; 0 if it began anew."""


def resumed_from(step: int) -> None:
    """Report that this rank has loaded the state after ``step`` optimizer steps and goes on from there.

    Each rank that has loaded a state calls this before its first step; 0 means that there was none to load.
    Does nothing outside of a cpulaunch job, and in processes that a rank forks.
    """
    global resumed_step
    resumed_step = step
    if report is not None:
        report(encode(Resumes(step)))


def saved(step: int, *, leaving: bool = False) -> None:
    """Report that the state after ``step`` optimizer steps is on disk, so the job can go on from there.

    ``leaving``: this rank now ends because of a signal.
    """
    if report is not None:
        report(encode(Saves(step, leaving)))


def saves_at(signals: Iterable[int]) -> None:
    """Report that from now on these signals, and no others, make this rank save."""
    if report is not None:
        report(encode(SavesAt([int(number) for number in signals])))
