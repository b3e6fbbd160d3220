"""The attempts of a job, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from cpulaunch.errors import CpulaunchError
from cpulaunch.supervise.attempt import Attempt, RunningAttempt, start_attempt
from cpulaunch.supervise.loop import AttemptLoop
from cpulaunch.supervise.outcome import Outcome
from cpulaunch.supervise.output import Console

Decide = Callable[[Outcome, Attempt], Attempt | None]
"""What to run after an attempt that has ended in some way; None where that is the job's outcome."""


async def run_attempts(running: RunningAttempt, console: Console, decide: Decide) -> Outcome:
    """Watch one attempt after the other, as ``decide`` says; the outcome is the last one's.

    No attempt follows once the user has asked for the end, or where the next one can't be started.
    """
    began = time.monotonic()
    while True:
        loop = AttemptLoop(running, console, began)
        outcome = replace(await loop.run(), restarts=running.attempt.restart_count)
        if loop.job.user_signals:
            return outcome
        try:
            following = decide(outcome, running.attempt)
            if following is None:
                return outcome
            running = start_attempt(following, console)
        except CpulaunchError as e:
            console.tell(f"the job can't be started once more: {e}" + (f" ({e.hint})" if e.hint else ""))
            return outcome
