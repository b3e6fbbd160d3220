"""Messages between spawners, over the stdin and stdout of ssh: JSON, one message per line.

A parent sends hosts and commands to its child, and the child reports starts, ends and failures.  The child's
stdout also carries the output of its agents, so its messages have the prefix MARK.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from cpulaunch import wire
from cpulaunch.messages import Unknown
from cpulaunch.wire import MessageError

MARK = b"cpulaunch-spawner: "
"""The prefix of a message to the parent.  On its line, output of the login shell may precede it."""

FAN_OUT = 32
"""The largest number of hosts that a spawner connects to.  Spawners on these hosts connect to the rest."""


class Host(NamedTuple):
    """A host, its first rank, and the number of its ranks.  ``here`` marks the launching host."""

    name: str
    first: int
    ranks: int
    here: bool = False


# ---- parent → child


class Start(NamedTuple):
    """Start agents on the first of ``hosts``, and spawners on the others.  This is the first message.

    Each of ``hosts`` is a row of `Host`.  ``size`` is the job's number of ranks.  The rank ``reader`` reads
    the launching host's stdin.  ``agent`` is the command line of each agent, ``ssh`` is the command line of
    ssh up to the host's name, and ``remote`` is the line of sh that starts a spawner.  ``env`` is added to
    each agent's environment.
    """

    hosts: list[list[Any]]
    size: int
    reader: int
    agent: list[str]
    ssh: list[str]
    remote: str
    env: dict[str, Any]


class Input(NamedTuple):
    """A piece of the reader's stdin, packed by `wire.pack`; None at the end of stdin."""

    data: str | None


class End(NamedTuple):
    """Send this signal to all agents."""

    signal: int


# ---- child → parent


class Started(NamedTuple):
    """The spawner of this host has started.  All further output comes from its agents."""

    host: str


class NotStarted(NamedTuple):
    """The agents of ``host``, a row of `Host`, can't be started.  ``why`` is the reason."""

    host: list[Any]
    why: str


class InputWanted(NamedTuple):
    """The reader has received all input sent so far, and waits for more."""


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
    """The sender can't reach ``host``, a row of `Host`.  ``why`` is the reason."""

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
    """Encode a message as one line of any length, as an environment may take megabytes."""
    return json.dumps({"type": KINDS[type(message)], **message._asdict()}).encode() + b"\n"


def decode(line: bytes, kinds: Mapping[str, type[Any]]) -> Any:
    """Decode a line as a message of one of ``kinds``.  Raises MessageError."""
    message = wire.decode(line, kinds)
    if isinstance(message, Unknown):
        raise MessageError(f"an unknown kind of message, {message.kind!r}")
    return message


def split_hosts(hosts: list[Host]) -> list[list[Host]]:
    """Divide hosts, in order, into at most FAN_OUT groups: one for each child, the child's own host first."""
    count = min(FAN_OUT, len(hosts))
    bounds = [number * len(hosts) // count for number in range(count + 1)] if count else []
    return [hosts[first:last] for first, last in pairwise(bounds)]
