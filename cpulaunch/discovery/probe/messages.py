"""What hosts are asked about themselves, and what they answer.

Messages like those of ``cpulaunch.messages``, which encodes and decodes them, over the stdin and stdout of
``remote``.  The ``versions`` of an answer say which cpulaunch has sent it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

ANSWER_TIMEOUT = 7.0
"""Seconds that a host has to answer: ssh's own five to connect, and what Python takes to start."""

NO_PYTHON, NO_CPULAUNCH = 97, 98
"""Exit codes of our own for what the remote shell finds missing; ssh's own is 255."""

MARK = "cpulaunch-answer: "
"""Before an answer, as what rc files print may come before it on the same stream."""


# ---- launcher → probe


class ProbeRequest(NamedTuple):
    """What is asked of every host.

    ``master``: a name or address of the first host, which alone opens ``port`` (0: a free one; None: none)
    for the others to try.  ``interface``: the one that the user chose.  ``directory`` and ``files`` should be
    there, ``optional`` may be missing, too, ``identical`` are files that must have the same content on all
    hosts.  ``packages`` are the directories that ``python`` imports from, ``libraries`` those with shared
    libraries to look at before the system's.  ``limits``: the ranks' values of
    `rate_cache.INSTRUCTION_LIMITS`, where they are set.
    """

    python: str
    directory: str
    files: list[str]
    optional: list[str]
    identical: list[str]
    packages: list[str]
    libraries: list[str]
    master: str
    port: int | None
    interface: str | None
    limits: dict[str, Any]


class ConnectRequest(NamedTuple):
    """Try to reach the master, at each of these names and addresses."""

    addresses: list[str]
    port: int


# ---- probe → launcher


class ProbeAnswer(NamedTuple):
    """What is true of a host.

    ``time`` is its clock, in seconds since 1970.  ``versions`` are those of packages, ``digests`` of the
    identical files: SHA-256 in hexadecimal.  None is what is not there.  ``directory``: whether it is there;
    ``missing`` are files that aren't, optional ones among them.  ``shm``: bytes of /dev/shm.  ``reached_at``
    and ``reached_from`` are the two addresses of the ssh connection, None where there is none.
    ``interfaces`` are rows of name, address and prefix length.  ``master`` are the addresses that the
    master's name has there, ``source`` is the host's own address that leads to it.  ``facts`` are
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
    """Why the master can't be reached, by the address; None where it can."""

    errors: dict[str, Any]


Request = ProbeRequest | ConnectRequest
Answer = ProbeAnswer | ConnectAnswer

TO_PROBE: Mapping[str, type[Request]] = {"probe": ProbeRequest, "connect": ConnectRequest}
FROM_PROBE: Mapping[str, type[Answer]] = {"answer": ProbeAnswer, "connected": ConnectAnswer}
KINDS: Mapping[type[Request | Answer], str] = {
    cls: kind for kinds in (TO_PROBE, FROM_PROBE) for kind, cls in kinds.items()
}


class ProbeResponse(NamedTuple):
    """What came back from a host: its answer, or why there is none.  Never sent.

    ``exit_code`` and ``error`` are the remote shell's (or ssh's own, 255) and what it printed.  Without an
    exit code, ``error`` says why the host could not be asked, or it was silent for ANSWER_TIMEOUT.  ``sent``
    and ``received`` are when, in seconds since the epoch.
    ``connect_error``: why it couldn't reach the master.
    """

    answer: ProbeAnswer | None
    exit_code: int | None = None
    error: str = ""
    sent: float = 0.0
    received: float = 0.0
    connect_error: str | None = None
