"""Messages between spawners, over the stdin and stdout of ssh: JSON, one message per line.

A parent sends its child the hosts and commands to start, and the child reports starts, ends and failures.
The child's stdout also carries the output of its agents, so its messages have the prefix MARK.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from cpulaunch import wire
from cpulaunch.messages import Unknown
from cpulaunch.wire import MessageError

MARK = b"cpulaunch-spawner: "
"""The prefix of a message to the parent.  An incomplete line of the login shell may precede it."""

FAN_OUT = 32
"""The largest number of hosts that a spawner connects to itself; spawners on these connect to the rest."""


class Host(NamedTuple):
    """A host, its first rank, and the number of its ranks.  ``here`` marks the launching host."""

    name: str
    first: int
    ranks: int
    here: bool = False


# ---- parent → child


class Start(NamedTuple):
    """Start the agents of the first of ``hosts``, and spawners on the others; always the first message.

    Each of ``hosts`` is a row of `Host`.  ``size`` is the number of all ranks of the job, and ``reader`` the
    rank that reads the launching host's stdin.  ``agent`` is the command line of each agent, ``ssh`` the
    command line of ssh up to the host, and ``remote`` the line of sh that starts a spawner.  ``env`` is added
    to each agent's environment.
    """

    hosts: list[list[Any]]
    size: int
    reader: int
    agent: list[str]
    ssh: list[str]
    remote: str
    env: dict[str, Any]


class Input(NamedTuple):
    """A piece of the reader's stdin, packed by `wire.pack`; None at its end."""

    data: str | None


class End(NamedTuple):
    """Send this signal to all agents."""

    signal: int


# ---- child → parent


class Started(NamedTuple):
    """The spawner of this host has started; its output from now on is that of its agents."""

    host: str


class NotStarted(NamedTuple):
    """The agents of ``host``, a row of `Host`, can't be started; ``why`` says the reason."""

    host: list[Any]
    why: str


class InputWanted(NamedTuple):
    """The reader has received all of its stdin sent so far, and waits for more."""


class Failed(NamedTuple):
    """An agent of this host has ended with a nonzero exit code while others still run."""

    host: str
    code: int


class Ended(NamedTuple):
    """All agents of this host have ended.  ``code`` is the first nonzero exit code, or 0."""

    host: str
    code: int


class Lost(NamedTuple):
    """The connection to this host was lost.  Its agents go on while they can reach the launcher."""

    host: str


class Unreached(NamedTuple):
    """``host``, a row of `Host`, can't be reached from the sender; ``why`` says the reason."""

    host: list[Any]
    why: str


TO_CHILD: Mapping[str, type[Any]] = {"start": Start, "input": Input, "end": End}
TO_PARENT: Mapping[str, type[Any]] = {
    "started": Started,
    "not_started": NotStarted,
    "input_wanted": InputWanted,
    "failed": Failed,
    "ended": Ended,
    "lost": Lost,
    "unreached": Unreached,
}
KINDS = {cls: kind for kinds in (TO_CHILD, TO_PARENT) for kind, cls in kinds.items()}


def encode(message: NamedTuple) -> bytes:
    """Encode a message as one line.  Its length is not limited, as an environment may have megabytes."""
    return json.dumps({"type": KINDS[type(message)], **message._asdict()}).encode() + b"\n"


def decode(line: bytes, kinds: Mapping[str, type[Any]]) -> Any:
    """Decode a line as a message of one of ``kinds``.  Raises MessageError."""
    message = wire.decode(line, kinds)
    if isinstance(message, Unknown):
        raise MessageError(f"an unknown kind of message, {message.kind!r}")
    return message


def grouped(hosts: list[Host]) -> list[list[Host]]:
    """Divide hosts, in order, among at most FAN_OUT children.

    The first host of each group is the child's own; the child starts the others.
    """
    count = min(FAN_OUT, len(hosts))
    bounds = [number * len(hosts) // count for number in range(count + 1)] if count else []
    return [hosts[first:last] for first, last in pairwise(bounds)]
