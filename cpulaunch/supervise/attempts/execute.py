"""Attempt → outcome: the attempts of a job, one after the other."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from cpulaunch.errors import CpulaunchError
from cpulaunch.supervise.attempts.attempt import Attempt, RunningAttempt, let_signals_raise, start_attempt
from cpulaunch.supervise.attempts.sweep import Unswept, sweep
from cpulaunch.supervise.job.outcome import INTERRUPTED, Outcome
from cpulaunch.supervise.output.lines import Console


class Ended(NamedTuple):
    """An attempt that has ended, the job's outcome by then, and hosts that may have something of it left.

    ``traced``: it, or one before, has traced the steps that ``--profile`` names.
    """

    attempt: Attempt
    outcome: Outcome
    unswept: Sequence[Unswept] = ()
    traced: bool = False


Decide = Callable[[Ended], Attempt | None]
"""What to run after an attempt that has ended; None where that is the job's end.  Raises CpulaunchError."""


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
        return _run_attempts(started, console, decide)
    except BaseException:
        sweep(first.job_id)
        raise


def _run_attempts(running: RunningAttempt, console: Console, decide: Decide | None) -> Outcome:
    """Watch one attempt after the other, as ``decide`` says; the outcome is the last one's.

    No attempt follows once the user has asked for the end, or where the next one can't be started.
    """
    # Importing asyncio takes 20 ms, which mpiexec needs anyway until it has started its first rank.
    import asyncio

    import cpulaunch.supervise.attempts.loop  # noqa: F401  before the freeze

    gc.freeze()
    gc.enable()
    began = time.monotonic()
    ended: Ended | None = None
    while True:
        ended, interrupted = asyncio.run(_run(running, console, began, ended, thorough=decide is not None))
        if interrupted or decide is None:
            return ended.outcome
        try:
            let_signals_raise()  # as the loop has given them back
            following = decide(ended)
            if following is None:
                return ended.outcome
            running = start_attempt(following, console)
        except CpulaunchError as e:
            console.tell(f"the job can't be started again: {e}" + (f" ({e.hint})" if e.hint else ""))
            return ended.outcome
        except KeyboardInterrupt:
            return _interrupted(ended.outcome, signal.SIGINT)
        except SystemExit as e:
            return _interrupted(ended.outcome, int(e.code or 0) - 128)


async def _run(
    running: RunningAttempt, console: Console, began: float, before: Ended | None, *, thorough: bool
) -> tuple[Ended, bool]:
    """Watch one attempt to its end; also, whether the user has asked for that.

    ``thorough``: look at every host if it fails.
    """
    from cpulaunch.supervise.attempts.loop import AttemptLoop

    earlier = before.outcome if before else None
    attempts, stalls = (earlier.attempts, earlier.stalls) if earlier else ((), ())
    traced = before is not None and before.traced
    loop = AttemptLoop(running, console, began, stalls=len(stalls), thorough=thorough, traced=traced)
    outcome = (await loop.run()).after(attempts, stalls)
    return Ended(running.attempt, outcome, loop.unswept, loop.traced), loop.job.user_signals > 0


def _interrupted(outcome: Outcome, number: int) -> Outcome:
    """The job's, where the user has asked for its end between two attempts."""
    return replace(outcome, kind=INTERRUPTED, exit_code=128 + number, first_failure=None, told=True)
