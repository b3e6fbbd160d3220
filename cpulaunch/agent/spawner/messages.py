"""What spawners say to each other, over the stdin and stdout of ssh: JSON, one message per line.

A spawner that ssh has started is told by its parent what to start, and reports what has become of it.  A
spawner's stdout also carries what its agents print, so its own lines have a mark.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from cpulaunch import wire
from cpulaunch.messages import Unknown
from cpulaunch.wire import MessageError

MARK = b"cpulaunch-spawner: "
"""Before a message to the parent, which may follow a line of the login shell that has no end."""

FAN_OUT = 32
"""Hosts that a spawner connects to itself; those beyond are started by spawners on these."""


class Host(NamedTuple):
    """A host, the number of its first rank, and how many it has.  ``here``: the launching host."""

    name: str
    first: int
    ranks: int
    here: bool = False


# ---- parent → child


class Start(NamedTuple):
    """Start the agents of the first of ``hosts``, and spawners on the others; always the first message.

    ``hosts`` are rows of a `Host`.  ``size`` is the number of all ranks of the job, ``reader`` the
    one that gets our stdin.  ``agent`` is the
    command line of each agent, ``ssh`` that of ssh up to the host, and ``remote`` the line of sh that starts
    a spawner.  ``env`` is added to each agent's environment.
    """

    hosts: list[list[Any]]
    size: int
    reader: int
    agent: list[str]
    ssh: list[str]
    remote: str
    env: dict[str, Any]


class Input(NamedTuple):
    """A piece of the reader's stdin, as `wire.pack` gives it; None at its end."""

    data: str | None


class End(NamedTuple):
    """Send this signal to all agents."""

    signal: int


# ---- child → parent


class Started(NamedTuple):
    """The spawner of this host is there, and starts its agents; what it prints from now on is theirs."""

    host: str


class NotStarted(NamedTuple):
    """The agents can't be started on the host of this row of a `Host`, and why."""

    host: list[Any]
    why: str


class InputWanted(NamedTuple):
    """The reader has taken all of its stdin that it was sent."""


class Failed(NamedTuple):
    """An agent of this host has ended with an exit code that isn't 0, and others of it run."""

    host: str
    code: int


class Ended(NamedTuple):
    """All agents of this host have ended; the first exit code that wasn't 0."""

    host: str
    code: int


class Lost(NamedTuple):
    """The connection to this host was lost.  Its agents go on as long as they reach the launcher."""

    host: str


class Unreached(NamedTuple):
    """The host of this row of a `Host` can't be reached from here, and why."""

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
    """One line of any length: an environment may have megabytes."""
    return json.dumps({"type": KINDS[type(message)], **message._asdict()}).encode() + b"\n"


def decode(line: bytes, kinds: Mapping[str, type[Any]]) -> Any:
    """The message of a line.  Raises MessageError."""
    message = wire.decode(line, kinds)
    if isinstance(message, Unknown):
        raise MessageError(f"an unknown kind of message, {message.kind!r}")
    return message


def grouped(hosts: list[Host]) -> list[list[Host]]:
    """The hosts that each of at most FAN_OUT children gets, in order: the child's own host, then those that
    it starts itself.
    """
    count = min(FAN_OUT, len(hosts))
    bounds = [number * len(hosts) // count for number in range(count + 1)] if count else []
    return [hosts[first:last] for first, last in pairwise(bounds)]
