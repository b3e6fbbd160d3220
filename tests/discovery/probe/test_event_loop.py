"""The event loop ends properly when a real signal arrives; handlers are as in the launcher."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from support.command import TIMEOUT

from cpulaunch.discovery.probe import event_loop

LEAVES = 128 + signal.SIGTERM


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    yield
    assert signal.getsignal(signal.SIGTERM) is leave
    signal.signal(signal.SIGTERM, before)


def test_tasks_are_cancelled_before_the_signal_handler_raises() -> None:
    ended = []

    async def waits(number: int) -> None:
        try:
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(TIMEOUT)
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    async def main() -> None:
        await asyncio.gather(*(asyncio.wait_for(waits(number), TIMEOUT) for number in range(5)))

    with pytest.raises(SystemExit) as raised:
        event_loop.run(main())
    assert raised.value.code == LEAVES
    assert sorted(ended) == [0, 1, 2, 3, 4]


def test_a_signal_that_arrives_with_the_result_is_not_lost() -> None:
    async def main() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 5

    with pytest.raises(SystemExit):
        event_loop.run(main())


def test_results_and_exceptions_are_passed_on() -> None:
    async def main() -> int:
        return 5

    async def fails() -> None:
        raise ValueError("no luck")

    assert event_loop.run(main()) == 5
    with pytest.raises(ValueError, match="no luck"):
        event_loop.run(fails())
