"""The control channel's language, spoken by the launcher and by every rank's agent.

One TCP connection per rank, one JSON object per line.  Right after the connection is made::

    launcher → agent    {"type": "challenge", "salt": S}
    agent → launcher    {"type": "hello", "rank": R, "at": T, …, "salt": K,
                          "proof": proof(token, "agent", S, R)}
    launcher → agent    {"type": "welcome", "proof": proof(token, "launcher", K, R)}

and then, at any time:

====================  =====================================================================
agent → launcher     ``started`` pid, cores, notes · ``output`` stream (1, 2), data ·
                      ``beat`` · ``failure`` error, file, line, traceback, at, told ·
                      ``found`` what the program really has · ``note`` a warning for the user ·
                      ``refused`` error: the program was not started, or is not where it should be ·
                      ``exit`` code or signal, at, told, asked, note: the program has ended
                      (the agent waits for ``done``)
launcher → agent     ``end`` signal, grace (seconds): end the program · ``done``: you may go
====================  =====================================================================

``at`` is in seconds since 1970 on the host's own clock; ``told`` says that the launcher had wanted the
program to end by then, so that its end is no failure of its own; ``asked`` is the signal by which somebody
else did.

The token travels in the environment; who doesn't know it can neither speak nor listen.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator
from typing import Any

from cpulaunch import variables

MAX_LINE = 1 << 20
"""Bytes; a longer line is hostile, or broken."""

MAX_OUTPUT = 1 << 16
"""Bytes of a program's output per message.  JSON makes at most six of each."""

BEATS_PER_TIMEOUT = 3
"""A rank is lost when as many beats in a row haven't come."""

UNREACHED = "cpulaunch: can't reach the launcher"
"""How an agent that no launcher hears begins its warning, after the rank's prefix."""

REPORT_FD = variables.REPORT_FD
"""The variable that tells the program's bootstrap where to write a ``failure`` for its agent."""

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of one line.  Raises ValueError where it isn't one."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError("not a message")
    return message


def pack(data: bytes) -> str:
    """Any bytes as text that JSON carries: UTF-8 stays readable, all else survives."""
    return data.decode("utf-8", "surrogateescape")


def unpack(text: str) -> bytes:
    """What ``pack`` packed."""
    return text.encode("utf-8", "surrogateescape")


def proof(token: str, role: str, salt: str, rank: int) -> str:
    """What only a holder of the job's token can say to ``salt``."""
    return hmac.digest(token.encode(), f"{role} {rank} {salt}".encode(), "sha256").hex()


def same(a: object, b: str) -> bool:
    """Whether a proof is right, in constant time."""
    return isinstance(a, str) and a.isascii() and hmac.compare_digest(a, b)


class Lines:
    """Cuts a stream of bytes into lines."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that ``data`` completes, without their ends.  ValueError: one is too long."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > MAX_LINE:
            raise ValueError("line too long")
        yield from lines
