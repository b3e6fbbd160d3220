"""Attempt → outcome: start a job, and watch it to its end."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from cpulaunch.supervise.attempt import Attempt, start_attempt
from cpulaunch.supervise.sweep import sweep

if TYPE_CHECKING:
    from cpulaunch.supervise.attempts import Decide
    from cpulaunch.supervise.outcome import Outcome
    from cpulaunch.supervise.output import Console


def once(outcome: Outcome, attempt: Attempt) -> None:
    """No attempt follows, however the first one ended."""


def execute(
    first: Attempt, console: Console, meanwhile: Callable[[], None], decide: Decide = once
) -> Outcome:
    """Run ``first``, and after it what ``decide`` says.

    ``meanwhile`` is called once the commands have been started, while mpiexec is still busy for 50 ms.
    Returns when no process of the job is left on any host.
    """
    try:
        _let_signals_raise()
        started = start_attempt(first, console)
        meanwhile()
        import asyncio  # takes 20 ms, which mpiexec needs anyway until it has started its first rank

        from cpulaunch.supervise.attempts import run_attempts

        gc.freeze()
        gc.enable()
        return asyncio.run(run_attempts(started, console, decide))
    except BaseException:
        sweep(first.job_id)
        raise


def _let_signals_raise() -> None:
    """Until the loop takes the signals over, one that would end us ends the job first."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
