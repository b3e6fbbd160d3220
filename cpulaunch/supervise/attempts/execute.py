"""Run the attempts of a job, one after the other, to its outcome."""

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
    """An attempt that has ended, with the job's outcome so far.

    ``unswept`` are hosts on which processes of the attempt may be left.  ``traced``: this or an earlier
    attempt has traced the steps that ``--profile`` names.
    """

    attempt: Attempt
    outcome: Outcome
    unswept: Sequence[Unswept] = ()
    traced: bool = False


Decide = Callable[[Ended], Attempt | None]
"""Returns the attempt to run after one that has ended, or None to end the job.  Raises CpulaunchError."""


def execute(
    first: Attempt, console: Console, meanwhile: Callable[[], None], decide: Decide | None = None
) -> Outcome:
    """Run the attempt ``first``, and then the attempts that ``decide`` returns, if it is given.

    ``meanwhile`` is called after the commands are started, while mpiexec is busy for another 50 ms.  Returns
    the job's outcome when no process of the job is left on any host.
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
    """Watch the attempts, and return the outcome of the last one.

    No attempt follows if the user has ended the job, or if the next one can't be started.
    """
    # Importing asyncio takes 20 ms.  By now, mpiexec is busy starting its first rank.
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
            let_signals_raise()  # the loop has removed its signal handlers
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
    """Watch one attempt to its end.  Also returns whether the user has ended it.

    ``thorough``: if the attempt fails, look for its processes on every host.
    """
    from cpulaunch.supervise.attempts.loop import AttemptLoop

    earlier = before.outcome if before else None
    attempts, stalls = (earlier.attempts, earlier.stalls) if earlier else ((), ())
    traced = before is not None and before.traced
    loop = AttemptLoop(running, console, began, stalls=len(stalls), thorough=thorough, traced=traced)
    outcome = (await loop.run()).after(attempts, stalls)
    return Ended(running.attempt, outcome, loop.unswept, loop.traced), loop.job.user_signals > 0


def _interrupted(outcome: Outcome, number: int) -> Outcome:
    """Return the outcome of a job that signal ``number`` has ended between two attempts."""
    return replace(outcome, kind=INTERRUPTED, exit_code=128 + number, first_failure=None, by_signal=True)
