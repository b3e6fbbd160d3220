"""The control port: authentication, strangers, and malformed messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.command import TIMEOUT, bounded, clean_environment
from support.jobs import job, outcome, run_changed
from support.programs import UNTIL_TOLD

from cpulaunch import messages
from cpulaunch.messages import (
    FROM_LAUNCHER,
    VERSION,
    AskProgress,
    AskTime,
    Challenge,
    Exit,
    Hello,
    LauncherReceipt,
    Note,
    Receipt,
    Welcome,
)
from cpulaunch.supervise.attempts.start import MAX_STRANGERS, MAX_STRANGERS_HERE, OWN_FILES
from cpulaunch.supervise.control import port
from cpulaunch.supervise.control.port import MAX_HELLO, Control
from cpulaunch.wire import MAX_LINE, decode, encode, proof


def control_address(launcher: subprocess.Popen[str]) -> str:
    """The launcher's address for agents on this machine: the name of an abstract Unix socket."""
    agent, *_ = psutil.Process(launcher.pid).children()
    address = agent.environ()["CPULAUNCH_CONTROL"]
    assert address.startswith("@cpulaunch-")
    return "\0" + address[1:]


def connect(address: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(TIMEOUT)
    connected.connect(address)
    return connected


def hello(**different: Any) -> Hello:
    return Hello(VERSION, 0, "s", "0" * 64, 0.0, 1, "x")._replace(**different)


HOSTILE = {
    "nothing": b"",
    "noise": bytes(range(256)) * 100,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no object": b"[1, 2]\n",
    "no type": b"{}\n",
    "no proof": encode(hello()).replace(b'"proof":', b'"pardon":'),
    "wrong proof": encode(hello()),
    "odd proof": encode(hello(proof="é")),
    "odd rank": encode(hello(rank="0")),
    "rank that isn't": encode(hello(rank=7, proof=proof("", "agent", "", 7))),
    "negative rank": encode(hello(rank=-1)),
    "another version, no proof": encode(hello(version=VERSION + 1)),
    "another message": encode(Exit(0, None, 0.0, False, 0, None)),
    "the launcher's message": encode(Welcome("0")),
    "unknown kind": b'{"type":"pardon"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "endless line": b"x" * (MAX_HELLO + 10),
    "line too long": b"x" * (MAX_HELLO + 10) + b"\n",
}


def say(address: str, data: bytes) -> None:
    """Send data as a stranger until the connection is closed, which may happen before everything is sent."""
    with contextlib.suppress(OSError), connect(address) as it:
        it.sendall(data)
        it.shutdown(socket.SHUT_WR)
        while it.recv(1 << 16):
            pass


def test_strangers_on_the_control_port_do_no_harm(marked, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("w") as file, job(tmp_path, marked, [], UNTIL_TOLD, stderr=file) as launcher:
        address = control_address(launcher)
        quiet = [connect(address) for _ in range(50)]
        for data in HOSTILE.values():
            say(address, data)
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0
        for connection in quiet:
            connection.close()
    assert [rank["status"] for rank in outcome(tmp_path)["ranks"]] == ["exit 0", "exit 0"]
    assert "Traceback" not in errors.read_text()
    (line,) = [line for line in errors.read_text().splitlines() if "refused" in line]
    assert re.fullmatch(
        r"cpulaunch: \d+ connections were refused: no proof of the job's token \(from this machine\)", line
    )


def test_a_fuzzer_on_the_control_port_costs_no_memory(marked, tmp_path: Path) -> None:
    dice = random.Random(4711)
    with job(tmp_path, marked, [], UNTIL_TOLD) as launcher:
        address = control_address(launcher)
        sizes = []
        for number in range(600):
            say(address, dice.choice(list(HOSTILE.values())) + dice.randbytes(dice.randrange(100_000)))
            if number >= 200:  # it has allocated all its memory by now
                sizes.append(psutil.Process(launcher.pid).memory_info().rss)
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0
    assert sizes[-1] < sizes[0] + (8 << 20)


class Audience:
    """Records the events that it gets."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, object]] = []
        self.gone = asyncio.Event()

    full = False

    def agent_connected(self, rank: int, hello: Hello, *, here: bool) -> None:
        self.heard.append(("connected", rank, hello.version))

    def agent_sent(self, rank: int, message: object) -> None:
        self.heard.append(("said", rank, message))

    def agent_reconnected(self, rank: int) -> None:
        self.heard.append(("back", rank, "is back"))

    def agent_disconnected(self, rank: int, error: str) -> None:
        self.heard.append(("disconnected", rank, error))
        self.gone.set()

    async def room(self) -> None:
        pass


Peer = tuple[StreamReader, StreamWriter, str]
"""A connection to the control port, and the salt for its proof."""


async def connect_from(origin: str, address: tuple[str, int]) -> Peer:
    reader, writer = await asyncio.open_connection(*address, local_addr=(origin, 0))
    challenge = decode(await reader.readline(), FROM_LAUNCHER)
    assert isinstance(challenge, Challenge)
    return reader, writer, challenge.salt


async def prove(peer: Peer, rank: int, **different: Any) -> None:
    """Connect as the agent of ``rank``, up to the launcher's welcome."""
    reader, writer, salt = peer
    writer.write(encode(hello(rank=rank, proof=proof("token", "agent", salt, rank), **different)))
    assert decode(await reader.readline(), FROM_LAUNCHER) == Welcome(proof("token", "launcher", "s", rank))


async def connect_agent(address: tuple[str, int], **different: Any) -> Peer:
    peer = await connect_from("127.0.0.1", address)
    await prove(peer, 1, **different)
    return peer


@contextlib.contextmanager
def listening(size: int) -> Iterator[tuple[Audience, tuple[str, int], Control]]:
    """A control port for ``size`` ranks: the recorder of its events, its address, and the port itself."""
    audience = Audience()
    control = Control("token", size, audience)
    listener = socket.create_server(("127.0.0.1", 0))
    control.listen(listener)
    try:
        yield audience, listener.getsockname(), control
    finally:
        control.close()


def test_silent_strangers_do_not_keep_agents_from_connecting() -> None:
    """This holds even if there are more strangers than allowed, and they have the agent's own address."""

    async def crowd() -> list[tuple[str, int, object]]:
        with listening(size=2) as (audience, address, _):
            agents = [await connect_from("127.0.0.1", address)]
            await prove(agents[0], rank=0)
            silent = [await connect_from("127.0.0.1", address) for _ in range(MAX_STRANGERS + 50)]
            agents.append(await connect_from("127.0.0.1", address))
            await prove(agents[1], rank=1)
            assert await silent[0][0].read() == b""  # the first one was closed first
            assert not silent[-1][0].at_eof()
            heard = list(audience.heard)
        for _, writer, _ in (*agents, *silent):
            writer.close()
        return heard

    heard = asyncio.run(asyncio.wait_for(crowd(), TIMEOUT))
    assert heard == [("connected", 0, VERSION), ("connected", 1, VERSION)]


def test_silent_strangers_do_not_use_up_descriptors_for_logs(marked: dict[str, str], tmp_path: Path) -> None:
    """The launcher opens the ranks' logs when the ranks have connected."""
    program = ("--no-python", "sh", "-c", "touch up-$RANK; until test -e go; do sleep 0.01; done; echo said")
    limit = (4 + MAX_STRANGERS_HERE + OWN_FILES,) * 2
    with bounded(
        subprocess.Popen(
            [sys.executable, "-m", "cpulaunch", "run", "-n", "4", "--oversubscribe", "--tee", "none", *program],
            cwd=tmp_path, env=clean_environment(**marked), stdin=subprocess.DEVNULL, text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
        )
    ) as launcher, contextlib.ExitStack() as stack:  # fmt: skip
        while len(list(tmp_path.glob("up-*"))) < 4:
            assert launcher.poll() is None
            time.sleep(0.01)
        address = control_address(launcher)
        silent = [stack.enter_context(connect(address)) for _ in range(MAX_STRANGERS_HERE + 50)]
        assert silent[-1].recv(1)
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0
    assert [log.read_text() for log in tmp_path.glob("runs/*/rank-*.log")] == ["said\n"] * 4


def test_strangers_of_the_most_frequent_address_are_closed_first() -> None:
    async def crowd() -> None:
        with listening(size=1) as (_, address, _):
            slow = await connect_from("127.0.0.2", address)
            silent = [await connect_from("127.0.0.1", address) for _ in range(2 * MAX_STRANGERS)]
            await prove(slow, rank=0)
        for _, writer, _ in silent:
            writer.close()

    asyncio.run(asyncio.wait_for(crowd(), TIMEOUT))


def test_messages_of_strangers_take_no_memory() -> None:
    """A stranger that sends more than an agent's hello is disconnected, even within an endless line."""

    async def crowd() -> int:
        with listening(size=1) as (_, address, _):
            talkative = [await connect_from("127.0.0.1", address) for _ in range(40)]
            before = psutil.Process().memory_info().rss
            for _, writer, _ in talkative:
                writer.transport.set_write_buffer_limits(0)
                with contextlib.suppress(OSError):
                    for _ in range(15):
                        writer.write(b"x" * (1 << 16))
                        await writer.drain()
            await prove(await connect_from("127.0.0.1", address), rank=0)
            grown = psutil.Process().memory_info().rss - before
            for reader, _, _ in talkative:
                with contextlib.suppress(OSError):
                    assert await reader.read() == b""
            return grown

    assert asyncio.run(asyncio.wait_for(crowd(), TIMEOUT)) < 16 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_of_the_machine_is_not_challenged(marked: dict[str, str], tmp_path: Path) -> None:
    with job(tmp_path, marked, [], UNTIL_TOLD) as launcher:
        address = control_address(launcher)
        with connect(address) as own:
            assert own.recv(1 << 16).startswith(b'{"type":"challenge"')
        os.seteuid(65534)
        try:
            other = connect(address)
        finally:
            os.seteuid(0)
        with other:
            assert other.recv(1 << 16) == b""
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0


async def talk(lines: list[bytes], version: int = VERSION) -> Audience:
    """Return the launcher's events for an agent of rank 1 that sends ``lines`` and disconnects."""
    with listening(size=2) as (audience, address, _):
        _, writer, _ = await connect_agent(address, version=version)
        with contextlib.suppress(OSError):  # the launcher may disconnect before it has received everything
            writer.write(b"".join(lines))
            writer.write_eof()
        await audience.gone.wait()
        writer.close()
    return audience


NOTE = encode(messages.Note("x"))


@pytest.mark.parametrize(
    ("lines", "heard"),
    [
        ([], [("disconnected", 1, "")]),
        ([NOTE], [("said", 1, messages.Note("x")), ("disconnected", 1, "")]),
        (
            [b'{"type":"stall"}\n', NOTE],
            [
                ("said", 1, messages.Unknown("stall")),
                ("said", 1, messages.Note("x")),
                ("disconnected", 1, ""),
            ],
        ),
        (
            [encode(messages.End(9, 0)), NOTE],
            [("said", 1, messages.Unknown("end")), ("said", 1, messages.Note("x")), ("disconnected", 1, "")],
        ),
        ([b'{"type":"note"}\n', NOTE], [("disconnected", 1, "note without note")]),
        ([b"nonsense\n", NOTE], [("disconnected", 1, "not JSON")]),
        (
            [NOTE, NOTE[:-5]],
            [("said", 1, messages.Note("x")), ("disconnected", 1, "")],
        ),  # killed while it sent a line
    ],
)
def test_an_agents_messages_count_up_to_the_first_invalid_line(
    lines: list[bytes], heard: list[tuple[str, int, object]]
) -> None:
    audience = asyncio.run(asyncio.wait_for(talk(lines), TIMEOUT))
    assert audience.heard == [("connected", 1, VERSION), *heard]
    assert [type(what) for _, _, what in audience.heard[1:]] == [type(what) for _, _, what in heard]


def test_an_agent_of_another_version_is_disconnected_and_reported() -> None:
    audience = asyncio.run(asyncio.wait_for(talk([NOTE], version=VERSION + 1), TIMEOUT))
    assert audience.heard == [("connected", 1, VERSION + 1), ("disconnected", 1, "")]


def test_a_job_whose_agents_are_of_another_version_is_not_started(marked, tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import time; time.sleep(300)")
    code = (
        "from cpulaunch import messages; messages.VERSION += 1; from cpulaunch.cli.main import entry; entry()"
    )
    done = run_changed(code, "run", "-n", "2", "sleep.py", directory=tmp_path, env=marked)
    assert done.returncode == 3
    assert f"has version {VERSION} of the control protocol, the launcher version {VERSION + 1}" in done.stderr
    assert outcome(tmp_path)["kind"] == "start_failed"


def test_a_line_that_is_too_long_ends_the_connection() -> None:
    audience = asyncio.run(asyncio.wait_for(talk([b"x" * (MAX_LINE + 10) + b"\n"]), TIMEOUT))
    what, rank, error = audience.heard[-1]
    assert (what, rank) == ("disconnected", 1)
    assert error == f"a line of more than {MAX_LINE} bytes"


def _reset(writer: StreamWriter) -> None:
    """Break a connection as a firewall does: the launcher gets a RST."""
    its = writer.get_extra_info("socket")
    its.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("pause", [0.1, 0.0], ids=["noticed by reading", "noticed by writing"])
def test_an_agent_whose_connection_was_reset_continues(pause: float) -> None:
    """Data that the launcher has not acknowledged is sent again; the launcher's messages arrive once."""

    async def talk() -> tuple[Audience, list[object]]:
        with listening(size=2) as (audience, address, control):
            reader, writer, _ = await connect_agent(address)
            assert decode(await reader.readline(), FROM_LAUNCHER) == LauncherReceipt(0)
            writer.write(encode(Note("first")) + encode(Note("second"))[:9])  # cut in the middle of a message
            control.send(1, AskTime())
            assert decode(await reader.readline(), FROM_LAUNCHER) == AskTime()
            while len(audience.heard) < 2:
                await asyncio.sleep(0.01)
            _reset(writer)
            await asyncio.sleep(pause)
            control.send(1, AskProgress())
            reader, writer, _ = await connect_agent(address)
            got = [decode(await reader.readline(), FROM_LAUNCHER)]
            writer.write(encode(Receipt(1)) + encode(Note("second")))
            got.append(decode(await reader.readline(), FROM_LAUNCHER))
            while len(audience.heard) < 4:
                await asyncio.sleep(0.01)
        writer.close()
        return audience, got

    audience, got = asyncio.run(asyncio.wait_for(talk(), TIMEOUT))
    assert got == [LauncherReceipt(1), AskProgress()]
    assert [each[-1] for each in audience.heard] == [VERSION, Note("first"), "is back", Note("second")]


def test_an_agent_that_does_not_reconnect_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "BACK_WITHIN", 0.2)

    async def talk() -> Audience:
        with listening(size=2) as (audience, address, _):
            _, writer, _ = await connect_agent(address)
            _reset(writer)
            while len(audience.heard) < 2:
                await asyncio.sleep(0.01)
        return audience

    audience = asyncio.run(asyncio.wait_for(talk(), TIMEOUT))
    assert audience.heard[-1] == ("disconnected", 1, "")


@pytest.mark.parametrize("count", [-1, 1])
def test_an_acknowledgement_of_unsent_data_is_refused(count: int) -> None:
    audience = asyncio.run(asyncio.wait_for(talk([encode(Receipt(count))]), TIMEOUT))
    assert audience.heard[-1] == ("disconnected", 1, f"{count} messages acknowledged, of 0")


def test_a_second_agent_for_a_connected_rank_is_refused() -> None:
    async def second() -> None:
        with listening(size=2) as (audience, address, _):
            _, first, _ = await connect_agent(address)
            reader, other, salt = await connect_from("127.0.0.1", address)
            other.write(encode(hello(rank=1, proof=proof("token", "agent", salt, 1), pid=2)))
            assert await reader.readline() == b""
            assert audience.heard == [("connected", 1, VERSION)]
        first.close()
        other.close()

    asyncio.run(asyncio.wait_for(second(), TIMEOUT))
