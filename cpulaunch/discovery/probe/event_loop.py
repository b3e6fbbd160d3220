"""An event loop that signals end cleanly.  Standard library only.

A signal handler that raises an exception does so wherever the main thread is.  Within the loop's own code,
that would leave tasks unfinished, and their processes running.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` like ``asyncio.run``, but let signals of ENDING cancel it.

    Only signals with a Python handler do so.  The handler of the first signal runs after ``main`` has ended;
    if it doesn't raise, CancelledError is raised.  Call this in the main thread.
    """
    handlers = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}
    caught: list[signal.Signals] = []

    async def cancelled_by_signals() -> T:
        task = asyncio.create_task(main)

        def cancel(number: signal.Signals) -> None:
            caught.append(number)
            task.cancel()

        for number in handlers:
            asyncio.get_running_loop().add_signal_handler(number, cancel, number)
        return await task

    try:
        with contextlib.suppress(asyncio.CancelledError):
            return asyncio.run(cancelled_by_signals())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in caught[:1]:
            handlers[number](number, None)
    raise asyncio.CancelledError
