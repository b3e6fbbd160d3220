"""The control port: who may speak there, and what comes of those who may not, or say odd things."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
from support.command import TIMEOUT
from support.jobs import job, outcome
from support.programs import UNTIL_TOLD

from cpulaunch.messages import MAX_LINE, VERSION, Exit, Hello, Welcome, encode, proof


def control_port(launcher: subprocess.Popen[str]) -> int:
    (listening,) = [
        c for c in psutil.Process(launcher.pid).net_connections() if c.status == psutil.CONN_LISTEN
    ]
    return listening.laddr.port


def hello(**different: Any) -> Hello:
    return Hello(VERSION, 0, "s", "0" * 64, 0.0, 1, "x")._replace(**different)


HOSTILE = {
    "nothing": b"",
    "noise": bytes(range(256)) * 100,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no object": b"[1, 2]\n",
    "no type": b"{}\n",
    "no proof": b'{"type":"hello","version":1,"rank":0,"salt":"s","at":0,"pid":1,"host":"x"}\n',
    "wrong proof": encode(hello()),
    "odd proof": encode(hello(proof="é")),
    "odd rank": encode(hello(rank="0")),
    "rank that isn't": encode(hello(rank=7, proof=proof("", "agent", "", 7))),
    "negative rank": encode(hello(rank=-1)),
    "another version, no proof": encode(hello(version=2)),
    "another message": encode(Exit(0, None, 0.0, False, 0, None)),
    "the launcher's message": encode(Welcome("0")),
    "unknown kind": b'{"type":"pardon"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "endless line": b"x" * (MAX_LINE + 10),
    "line too long": b"x" * (MAX_LINE + 10) + b"\n",
}


def say(port: int, data: bytes) -> None:
    """What a stranger sends, who then waits until it is hung up on; that may be before all is sent."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as it:
        it.sendall(data)
        it.shutdown(socket.SHUT_WR)
        while it.recv(1 << 16):
            pass


def test_strangers_on_the_control_port_do_no_harm(marked, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("w") as file, job(tmp_path, marked, [], UNTIL_TOLD, stderr=file) as launcher:
        port = control_port(launcher)
        quiet = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        for data in HOSTILE.values():
            say(port, data)
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0
        for connection in quiet:
            connection.close()
    assert [rank["status"] for rank in outcome(tmp_path)["ranks"]] == ["exit 0", "exit 0"]
    assert "Traceback" not in errors.read_text()


def test_a_fuzzer_on_the_control_port_costs_no_memory(marked, tmp_path: Path) -> None:
    dice = random.Random(4711)
    with job(tmp_path, marked, [], UNTIL_TOLD) as launcher:
        port = control_port(launcher)
        sizes = []
        for number in range(600):
            say(port, dice.choice(list(HOSTILE.values())) + dice.randbytes(dice.randrange(100_000)))
            if number >= 200:  # by then it has all that it needs
                sizes.append(psutil.Process(launcher.pid).memory_info().rss)
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0
    assert sizes[-1] < sizes[0] + (8 << 20)
