"""Attempt → outcome: start a job, and watch it to its end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from cpulaunch.supervise.attempts.attempt import Attempt, let_signals_raise, start_attempt
from cpulaunch.supervise.attempts.sweep import sweep

if TYPE_CHECKING:
    from cpulaunch.supervise.attempts.attempts import Decide
    from cpulaunch.supervise.job.outcome import Outcome
    from cpulaunch.supervise.output.lines import Console


def execute(
    first: Attempt, console: Console, meanwhile: Callable[[], None], decide: Decide | None = None
) -> Outcome:
    """Run ``first``, and after it what ``decide`` says; without that, nothing.

    ``meanwhile`` is called once the commands have been started, while mpiexec is still busy for 50 ms.
    Returns when no process of the job is left on any host.
    """
    try:
        let_signals_raise()
        started = start_attempt(first, console)
        meanwhile()
        # It imports asyncio, which takes 20 ms that mpiexec needs anyway until it has started its first rank.
        from cpulaunch.supervise.attempts.attempts import run_attempts

        gc.freeze()
        gc.enable()
        return run_attempts(started, console, decide)
    except BaseException:
        sweep(first.job_id)
        raise
