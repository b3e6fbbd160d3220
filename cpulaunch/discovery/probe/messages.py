"""Requests to probed hosts and their answers.

``cpulaunch.wire`` encodes them.  They are sent over the stdin and stdout of ``remote``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

ANSWER_TIMEOUT = 7.0
"""Seconds within which a host must answer: ssh's timeout of 5 s to connect, and the start of Python."""

NO_PYTHON, NO_CPULAUNCH = 97, 98
"""Exit codes of the remote command if Python or cpulaunch is missing on the host."""

MARK = "cpulaunch-answer: "
"""The prefix of an answer.  rc files of the shell may print other lines."""


# ---- launcher → probe


class ProbeRequest(NamedTuple):
    """The request to a host."""

    python: str  # the ranks' interpreter
    directory: str  # must exist
    files: list[str]  # must exist
    optional: list[str]  # files that may be missing
    identical: list[str]  # files that must have the same content on all hosts
    packages: list[str]  # directories from which ``python`` imports packages
    libraries: list[str]  # directories with shared libraries, to be searched before the system's
    master: str  # name or address of the master, the first host
    ports: list[int]  # the master listens on the first free one; 0 is any; empty for other hosts
    interface: str | None  # the user's choice
    limits: dict[str, Any]  # the ranks' `rate_cache.INSTRUCTION_LIMITS`


class ConnectRequest(NamedTuple):
    """Try to connect to ``port`` of the master at each of its names and addresses."""

    addresses: list[str]
    port: int


# ---- probe → launcher


class ProbeAnswer(NamedTuple):
    """A host's answer."""

    name: str  # its own host name
    time: float  # its clock, in seconds since 1970
    versions: dict[str, Any]  # by package
    digests: dict[str, Any]  # hexadecimal SHA-256 of each identical file; None if it is missing
    directory: bool  # whether the directory exists
    missing: list[str]  # files, including optional ones
    shm: int | None  # size of /dev/shm in bytes
    reached_at: str | None  # its address of the ssh connection; None without ssh
    reached_from: str | None  # our address of the ssh connection; None without ssh
    interfaces: list[list[Any]]  # rows of name, address and prefix length
    master: list[str]  # the addresses to which it resolves the master
    source: str | None  # its own address on the route to the master
    facts: dict[str, Any] | None  # `model.facts.HostFacts` as JSON data
    facts_error: str | None
    listening: int | None  # the master's port
    listen_error: str | None


class ConnectAnswer(NamedTuple):
    """The error for each address of the master; None if the connection succeeded."""

    errors: dict[str, Any]


Request = ProbeRequest | ConnectRequest
Answer = ProbeAnswer | ConnectAnswer

TO_PROBE: Mapping[str, type[Request]] = {"probe": ProbeRequest, "connect": ConnectRequest}
FROM_PROBE: Mapping[str, type[Answer]] = {"answer": ProbeAnswer, "connected": ConnectAnswer}
KINDS: Mapping[type[Request | Answer], str] = {
    cls: kind for kinds in (TO_PROBE, FROM_PROBE) for kind, cls in kinds.items()
}


class ProbeResponse(NamedTuple):
    """The result of probing a host."""

    answer: ProbeAnswer | None
    exit_code: int | None = None  # of the remote shell, or 255 from ssh
    error: str = ""  # stderr; without an exit code, why ssh couldn't be started, or empty after a timeout
    sent: float = 0.0  # time of the request, in seconds since 1970 by our clock
    received: float = 0.0  # time of the answer
    connect_error: str | None = None  # why the host couldn't connect to the master
