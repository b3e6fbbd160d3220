"""Requests to probed hosts, and their answers.

They are encoded by ``cpulaunch.wire``, like those of ``cpulaunch.messages``, and travel over the stdin and
stdout of ``remote``.  The ``versions`` of an answer name the cpulaunch that has sent it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

ANSWER_TIMEOUT = 7.0
"""Seconds within which a host must answer: ssh's own 5 s to connect, and Python's start."""

NO_PYTHON, NO_CPULAUNCH = 97, 98
"""Exit codes of the remote command if Python or cpulaunch is missing there; ssh's own is 255."""

MARK = "cpulaunch-answer: "
"""The prefix of an answer.  rc files of the shell may print to the same stream before it."""


# ---- launcher → probe


class ProbeRequest(NamedTuple):
    """The request to every host.

    ``master`` is a name or address of the first host, which opens the first free one of ``ports`` for the
    others to try; 0 is any free port.  In requests to other hosts, ``ports`` is empty.  ``interface`` is the
    one that the user has chosen, if any.

    ``directory`` and ``files`` must exist, and the files ``optional`` may be missing.  The files
    ``identical`` must have the same content on all hosts.  ``packages`` are the directories that ``python``
    imports from, and ``libraries`` the directories to search for shared libraries before the system's.
    ``limits`` are the ranks' values of `rate_cache.INSTRUCTION_LIMITS` that are set.
    """

    python: str
    directory: str
    files: list[str]
    optional: list[str]
    identical: list[str]
    packages: list[str]
    libraries: list[str]
    master: str
    ports: list[int]
    interface: str | None
    limits: dict[str, Any]


class ConnectRequest(NamedTuple):
    """Try to connect to ``port`` of the master at each of these names and addresses."""

    addresses: list[str]
    port: int


# ---- probe → launcher


class ProbeAnswer(NamedTuple):
    """A host's answer.

    ``name`` is its host name, and ``time`` its clock in seconds since 1970.  ``versions`` are versions by
    package, and ``digests`` the SHA-256 in hexadecimal of each identical file; None for a missing one.
    ``directory`` says whether the directory exists, and ``missing`` lists missing files, including optional
    ones.  ``shm`` is the size of /dev/shm in bytes.

    ``reached_at`` and ``reached_from`` are the host's and our address of the ssh connection, None without
    ssh.  ``interfaces`` are rows of name, address and prefix length.  ``master`` are the addresses of the
    master as resolved there, and ``source`` is the host's own address that leads to it.  ``facts`` are
    `model.facts.HostFacts` as JSON data.  ``listening`` is the port that the master has opened.
    """

    name: str
    time: float
    versions: dict[str, Any]
    digests: dict[str, Any]
    directory: bool
    missing: list[str]
    shm: int | None
    reached_at: str | None
    reached_from: str | None
    interfaces: list[list[Any]]
    master: list[str]
    source: str | None
    facts: dict[str, Any] | None
    facts_error: str | None
    listening: int | None
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
    """The result of probing a host: its answer, or why there is none.  It is not sent.

    ``exit_code`` is the code of the remote shell, or 255 from ssh, and ``error`` its stderr.  Without an exit
    code, ``error`` says why the host could not be probed; it is empty if the host was silent for
    ANSWER_TIMEOUT.  ``sent`` and ``received`` are the times of request and answer by our clock, in seconds
    since 1970.  ``connect_error`` says why the host couldn't connect to the master.
    """

    answer: ProbeAnswer | None
    exit_code: int | None = None
    error: str = ""
    sent: float = 0.0
    received: float = 0.0
    connect_error: str | None = None
