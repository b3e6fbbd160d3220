"""End the launcher's processes: mpiexec or local agents."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Sequence

TOGETHER = 0.002
"""Seconds to wait for the end of further processes after the end of one."""

PAUSE = 0.7
"""Seconds between two signals."""


async def end_processes(
    processes: Sequence[subprocess.Popen[bytes]],
    patience: float,
    stop_signals: Sequence[int],
    child_ended: asyncio.Event,
) -> None:
    """Wait ``patience`` seconds for all ``processes`` to end, then send ``stop_signals`` in turn to the rest.

    ``child_ended`` is set at each SIGCHLD.
    """
    await _all_ended(processes, patience, child_ended)
    for number in stop_signals:
        for process in running(processes):
            process.send_signal(number)
        await _all_ended(processes, PAUSE, child_ended)


async def _all_ended(
    processes: Sequence[subprocess.Popen[bytes]], patience: float, child_ended: asyncio.Event
) -> None:
    deadline = time.monotonic() + patience
    while (processes := running(processes)) and (left := deadline - time.monotonic()) > 0:
        child_ended.clear()
        if running(processes):  # the last process may have ended before clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child_ended.wait(), left)
            await asyncio.sleep(TOGETHER)


def running(processes: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    return [process for process in processes if process.poll() is None]
