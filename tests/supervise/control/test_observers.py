"""Observers of a job: their authentication, and their number."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.command import TIMEOUT

from cpulaunch.errors import HostError
from cpulaunch.messages import VERSION, Beat, Challenge, Dump, Hello, Welcome
from cpulaunch.supervise.control.client import Observer
from cpulaunch.supervise.control.observer_messages import RankStacks
from cpulaunch.supervise.control.observers import MAX_OBSERVERS, Observers, status_of
from cpulaunch.supervise.control.port import Control, Refused
from cpulaunch.supervise.control.registry import Contact
from cpulaunch.supervise.job.events import DumpFinished
from cpulaunch.supervise.job.rank import Rank, RankState
from cpulaunch.wire import encode, observers_token, proof


class Launcher:
    """A launcher of two ranks; only one of them answers."""

    full = False

    def __init__(self) -> None:
        self.ranks = [Rank(0, "a", RankState.RUNNING), Rank(1, "b", RankState.RUNNING)]
        self.ranks[0].record_beat(Beat(8, 80), 1.0)
        self.wanted: list[bool] = []
        self.connected: list[int] = []
        self.answers = True
        self.refused = Refused()
        self.observers = Observers(
            "token",
            self.ranks,
            lambda: status_of(self.ranks, 61.0, 2, ending=False, stalled="no progress"),
            self.want,
            self.request_progress,
        )

    def want(self, native: bool) -> None:
        self.wanted.append(native)
        if self.answers:
            seen = DumpFinished(native, {0: Dump(1, 0.0, [], [{"pid": 7}], "")}, [1])
            asyncio.get_running_loop().call_soon(self.observers.deliver, seen)

    def request_progress(self, ranks: list[Rank]) -> None:
        """Record that rank 0 has progressed since its last beat.  Rank 1 is silent."""
        ranks[0].record_beat(Beat(14, 140), time.monotonic())

    def agent_connected(self, rank: int, hello: Hello, *, here: bool) -> None:
        self.connected.append(rank)


def with_launcher(asks: Callable[[Contact], Any], launcher: Launcher | None = None) -> Any:
    """Return the result of ``asks``, which runs in a thread beside a launcher."""

    async def run() -> Any:
        played = launcher or Launcher()
        control = Control("token", 2, played, played.observers)  # type: ignore[arg-type]
        listener = socket.create_server(("127.0.0.1", 0))
        control.listen(listener)
        played.refused = control.refused
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        contact = Contact("job", 1, "here", "", None, 0.0, address, observers_token("token"), [])
        try:
            return await asyncio.wait_for(asyncio.to_thread(asks, contact), TIMEOUT)
        finally:
            control.close()

    return asyncio.run(run())


def test_questions_and_their_answers() -> None:
    def asks(contact: Contact) -> Any:
        with Observer(contact) as observer:
            return observer.status(), observer.stacks(native=True), observer.stacks(native=False)

    launcher = Launcher()
    status, native, plain = with_launcher(asks, launcher)
    assert (status.state, status.hosts, status.ranks, status.running) == ("stalled", 2, 2, 2)
    assert (status.steps, status.collectives, status.stalled) == (14, 140, "no progress")
    late = RankStacks(1, "b", None, "its agent has not answered within 10 s")
    assert native == plain == [RankStacks(0, "a", [{"pid": 7}], ""), late]
    assert launcher.wanted == [True, False]


def test_rates_are_over_at_least_a_second() -> None:
    rank = Rank(0, "a", RankState.RUNNING)
    for at, steps in ((1.0, 10), (1.1, 14), (3.0, 14), (3.1, 20)):
        rank.record_beat(Beat(steps, 10 * steps), at)
    assert rank.rates == (2.0, 20.0)
    status = status_of([rank], 61.0, 0, ending=False)
    assert (status.steps, status.step_rate, status.collective_rate) == (20, 2.0, 20.0)


@pytest.mark.parametrize("token", ["", "token", "0" * 64])
def test_a_wrong_token_closes_the_connection(token: str) -> None:
    def asks(contact: Contact) -> None:
        with (
            pytest.raises(HostError, match="it closed the connection"),
            Observer(contact._replace(token=token)),
        ):
            pass

    launcher = Launcher()
    with_launcher(asks, launcher)
    assert str(launcher.refused).startswith("1 connection was refused: no proof")


def test_another_program_is_not_mistaken_for_the_launcher() -> None:
    """A program that now has the launcher's address learns nothing with which it could query the launcher."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        server.settimeout(TIMEOUT)

        def pretend() -> None:
            connected, _ = server.accept()
            with connected, connected.makefile("rb") as lines:
                connected.sendall(encode(Challenge("0")))
                lines.readline()
                connected.sendall(encode(Welcome(proof("?", "launcher of observers", "0", 0))))

        pretending = thread.submit(pretend)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        contact = Contact("job", 1, "here", "boot", None, 0.0, address, observers_token("token"), [])
        with pytest.raises(HostError, match=f"something else listens at {address}") as raised:
            Observer(contact).__enter__()
        pretending.result(TIMEOUT)
    assert raised.value.hint


def test_an_observer_token_is_not_an_agent_token() -> None:
    """Whoever has it can't act as a rank's agent, nor as the launcher."""
    launcher = Launcher()

    def asks(contact: Contact) -> bytes:
        host, _, port = contact.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connected:
            lines = connected.makefile("rb")
            salt = json.loads(lines.readline())["salt"]
            forged = proof(contact.token, "agent", salt, 0)
            connected.sendall(encode(Hello(VERSION, 0, "s", forged, 0.0, 1, "x")))
            return lines.readline()

    assert with_launcher(asks, launcher) == b""
    assert launcher.connected == []
    assert observers_token("token") not in ("token", proof("token", "launcher", "", 0))


def test_the_number_of_observers_is_limited() -> None:
    launcher = Launcher()
    launcher.answers = False  # they stay connected

    def asks(contact: Contact) -> None:
        there = [Observer(contact) for _ in range(MAX_OBSERVERS)]
        for each in there:
            each.__enter__()
            each.status()
        with pytest.raises(HostError, match="it closed the connection"), Observer(contact):
            pass
        for each in there:
            each.status()
            each.__exit__()

    with_launcher(asks, launcher)
    assert str(launcher.refused) == ""  # the ninth connection counts as an observer, not as a stranger
