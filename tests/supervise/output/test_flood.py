"""The control port under a flood from the agents' own address: agents connect, and the launcher keeps little
data."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.agents import TOKEN, agent, placement, rank_plan
from support.command import TIMEOUT
from support.marks import repeat

from cpulaunch import messages, variables, wire
from cpulaunch.messages import Exit, Hello, Release
from cpulaunch.plan.placement import HostPlan
from cpulaunch.supervise.attempts.start import BACKLOG, MAX_STRANGERS
from cpulaunch.supervise.control.port import MAX_HELLO, Control

RANKS = 4
AT_ONCE = 2 * MAX_STRANGERS
"""Connections that the flood tries to have."""

FLOOD = """
import asyncio, sys
port, at_once, line = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode().decode("unicode_escape").encode()
async def stranger():
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await reader.readline()
            writer.write(line)
            await reader.read()
            writer.close()
        except OSError:
            pass
async def flood():
    await asyncio.gather(*(stranger() for _ in range(at_once)))
asyncio.run(flood())
"""

WHAT_THEY_SAY = (
    "x" * (MAX_HELLO - 1),
    wire.encode(Hello(messages.VERSION, 0, "s", "0" * 64, 0.0, 1, "x")).decode(),
    "",
)


class Counting(Control):
    """A control port that counts what strangers cost, and releases agents when their programs have ended."""

    def __init__(self, size: int) -> None:
        super().__init__(TOKEN, size, self)
        self.accepted = self.most = self.most_bytes = self.reads = 0
        self.flooded, self.all_ended = asyncio.Event(), asyncio.Event()
        self.exits: dict[int, int | None] = {}

    full = False

    def _receive(self, accepted: socket.socket) -> None:
        super()._receive(accepted)
        self.accepted += 1
        self.most = max(self.most, len(self._strangers))
        if self.accepted % 100 == 0:
            held = sum(len(each._lines.rest) + len(each._outgoing) for each in self._strangers)
            self.most_bytes = max(self.most_bytes, held)
        if self.accepted == 2 * AT_ONCE:
            self.flooded.set()

    def agent_connected(self, rank: int, hello: Hello, *, here: bool) -> None:
        pass

    def agent_sent(self, rank: int, message: object) -> None:
        if isinstance(message, Exit):
            self.exits[rank] = message.code
            self.send(rank, Release())

    def agent_disconnected(self, rank: int, error: str) -> None:
        if len(self.exits) == RANKS:
            self.all_ended.set()


@contextlib.asynccontextmanager
async def flood(port: int, line: str) -> AsyncIterator[None]:
    arguments = (str(port), str(AT_ONCE), line.replace("\n", "\\n"))
    flooding = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOD, *arguments)
    try:
        yield
    finally:
        flooding.kill()
        await flooding.wait()


@pytest.mark.parametrize(
    "line", [WHAT_THEY_SAY[0], *map(repeat, WHAT_THEY_SAY[1:])], ids=["endless", "hello", "silent"]
)
def test_a_flood_from_the_agents_own_address_keeps_no_agent_out(line: str, tmp_path: Path) -> None:
    placed = placement(tmp_path, hosts=[HostPlan("localhost", False, {}, (rank_plan(),) * RANKS)])
    agents: list[subprocess.Popen[str]] = []

    async def job() -> Counting:
        port = Counting(RANKS)
        listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        number = listener.getsockname()[1]
        port.listen(listener)
        try:
            async with flood(number, line):
                await port.flooded.wait()
                env = {variables.CONTROL: f"127.0.0.1:{number}", variables.TOKEN: TOKEN}
                agents.extend(agent(placed, "pass", env, rank=n, size=RANKS) for n in range(RANKS))
                await port.all_ended.wait()
        finally:
            port.close()
        return port

    try:
        port = asyncio.run(asyncio.wait_for(job(), TIMEOUT))
        assert [process.wait(TIMEOUT) for process in agents] == [0] * RANKS
    finally:
        for process in agents:
            process.kill()
            process.communicate(timeout=TIMEOUT)
    assert port.exits == dict.fromkeys(range(RANKS), 0)
    assert port.most <= RANKS + MAX_STRANGERS + 1
    assert port.most_bytes <= port.most * MAX_HELLO
    assert not list(port._strangers)
