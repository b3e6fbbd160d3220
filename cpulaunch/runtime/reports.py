"""Tells the launcher which state this rank goes on from or has saved: how far it is, and why it ends."""

from __future__ import annotations

from collections.abc import Callable

from cpulaunch.messages import Resumes, Saves, encode

report: Callable[[bytes], object] | None = None
"""Writes a line to this rank's agent; the bootstrap puts it here when this module is loaded."""


def resumed_from(step: int) -> None:
    """This rank has loaded the state after ``step`` optimizer steps, and goes on from there.

    To be called by each rank that has loaded one, before its first step; 0 where there was none to load.
    Outside of a cpulaunch job, and in processes that a rank forks, it does nothing.
    """
    if report is not None:
        report(encode(Resumes(step)))


def saved_and_leaving(step: int) -> None:
    """This rank has saved the state after ``step`` optimizer steps, and ends because of a signal."""
    if report is not None:
        report(encode(Saves(step)))
