"""Tells the launcher from which step this rank goes on: for `outcome.json`, and to count progress by."""

from __future__ import annotations

from collections.abc import Callable

from cpulaunch.messages import Resumes, encode

report: Callable[[bytes], object] | None = None
"""Writes a line to this rank's agent; the bootstrap puts it here when this module is loaded."""


def resumed_from(step: int) -> None:
    """This rank has loaded the state after ``step`` optimizer steps, and goes on from there.

    To be called by each rank that has loaded one, before its first step; 0 where there was none to load.
    Outside of a cpulaunch job, and in processes that a rank forks, it does nothing.
    """
    if report is not None:
        report(encode(Resumes(step)))
