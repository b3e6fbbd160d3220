"""An event loop that ends cleanly after a signal.  Standard library only.

Python's signal handlers may raise an exception in the middle of asyncio's own code.  Then tasks would remain
unfinished, and their processes would keep running.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` like ``asyncio.run``, but cancel it after one of SIGNALS that has a Python handler.

    The handler runs after ``main`` has ended; if it doesn't raise an exception, CancelledError is raised.
    Call this in the main thread.
    """
    handlers = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    caught: list[signal.Signals] = []

    async def run_cancellable() -> T:
        task = asyncio.create_task(main)

        def cancel(number: signal.Signals) -> None:
            caught.append(number)
            task.cancel()

        for number in handlers:
            asyncio.get_running_loop().add_signal_handler(number, cancel, number)
        return await task

    try:
        with contextlib.suppress(asyncio.CancelledError):
            return asyncio.run(run_cancellable())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in caught[:1]:
            handlers[number](number, None)
    raise asyncio.CancelledError
