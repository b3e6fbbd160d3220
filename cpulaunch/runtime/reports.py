"""Tells the agent which state this rank goes on from or has saved, and which signals make it save."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cpulaunch.messages import Resumes, Saves, SavesAt
from cpulaunch.wire import encode

report: Callable[[bytes], object] | None = None
"""Writes a line to this rank's agent; the bootstrap puts it here when this module is loaded."""

resumed_step = 0
"""The step that this rank goes on from; 0 where it began anew."""


def resumed_from(step: int) -> None:
    """This rank has loaded the state after ``step`` optimizer steps, and goes on from there.

    To be called by each rank that has loaded one, before its first step; 0 where there was none to load.
    Outside of a cpulaunch job, and in processes that a rank forks, nobody is told.
    """
    global resumed_step
    resumed_step = step
    if report is not None:
        report(encode(Resumes(step)))


def saved(step: int, *, leaving: bool = False) -> None:
    """The state after ``step`` optimizer steps is on disk, from where the job can go on.

    ``leaving``: this rank ends now, because of a signal.
    """
    if report is not None:
        report(encode(Saves(step, leaving)))


def saves_at(signals: Iterable[int]) -> None:
    """From now on, this rank takes these signals as the wish to save, and no others."""
    if report is not None:
        report(encode(SavesAt([int(number) for number in signals])))
