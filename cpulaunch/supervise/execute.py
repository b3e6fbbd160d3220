"""Commands → outcome: start a job, watch it to its end."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cpulaunch.launchers.command import Command
from cpulaunch.plan.plan import Plan
from cpulaunch.supervise.attempt import Job
from cpulaunch.supervise.start import listen, start
from cpulaunch.supervise.sweep import sweep

if TYPE_CHECKING:
    from cpulaunch.supervise.outcome import Outcome
    from cpulaunch.supervise.output import Output


def execute(
    plan: Plan,
    commands: Sequence[Command],
    job: Job,
    directory: Path,
    output: Output,
    tell: Callable[[str], None],
    meanwhile: Callable[[], None],
    *,
    verbose: bool = False,
) -> Outcome:
    """Run ``commands`` in ``directory`` and watch the ranks of ``plan`` until all have ended.

    ``tell`` gets lines for the user; ``verbose``: one for each event.
    ``meanwhile`` is called once the commands have been started, while
    mpiexec is still busy for 50 ms.  Returns when no process of the job is left on any host.
    """
    listener, address = listen(plan)
    try:
        _let_signals_raise()
        starters = start(commands, job.variables(address), directory, plan.world_size)
        meanwhile()
        import asyncio  # takes 20 ms, which mpiexec needs anyway until it has started its first rank

        from cpulaunch.supervise.watch import Watch

        gc.freeze()
        gc.enable()
        return asyncio.run(Watch(plan, job, starters, output, tell, verbose=verbose).run(listener))
    except BaseException:
        sweep(job.id)
        raise


def _let_signals_raise() -> None:
    """Until the watch takes the signals over, one that would end us ends the job first."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
