"""Causes of a rank's failure, as data.

Programs, agents and the process group ``ccl`` report causes.  The kind of each cause tells the launcher which
failure came first, and whether to restart the job.  `supervise.job.sentences` turns causes into sentences;
``ccl/csrc/core/cause.cpp`` does this for the exceptions of ``ccl``.  No program parses these sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple


class Kind(str, Enum):
    """The kind of a cause."""

    # Failures of the program itself.
    EXCEPTION = "exception"
    USAGE_ERROR = "usage_error"  # cpulaunch can't do what the script asks for
    EXIT = "exit"  # the program chose its exit code
    UNEXPLAINED_EXIT = "unexplained_exit"  # the exit code comes neither from an exception nor from sys.exit
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"  # perhaps out of memory
    KILLED_BY_OTHERS = "killed_by_others"  # not out of memory
    STALLED = "stalled"

    # Failures that ccl reports, as in ccl/csrc/core/cause.hpp.
    PEER_ENDED = "peer_ended"
    PEER_LEFT = "peer_left"
    CONNECTION_LOST = "connection_lost"
    HOST_SILENT = "host_silent"
    STORE_GONE = "store_gone"
    STORE_SILENT = "store_silent"
    CALLS_DIFFER = "calls_differ"
    SIZES_DIFFER = "sizes_differ"
    PEER_AHEAD = "peer_ahead"
    PEER_LATE = "peer_late"
    PEER_AWAITED = "peer_awaited"
    MESSAGE_MISSING = "message_missing"
    DATA_MISSING = "data_missing"
    CALLBACK_FAILED = "callback_failed"
    SIGNAL_HANDLER = "signal_handler"
    ABORTED = "aborted"
    TRANSPORT_FAILED = "transport_failed"

    # Errors of other libraries: a peer is gone, or has not answered.
    PEER_GONE = "peer_gone"

    # Failures of agents, hosts and the launcher's processes.
    HOST_LOST = "host_lost"
    HOST_FAILED = "host_failed"  # the batch system reports it
    AGENT_KILLED = "agent_killed"
    AGENT_SIGNALED = "agent_signaled"  # by mpiexec or a batch system
    AGENT_MALFORMED = "agent_malformed"  # it sent a line that is not a valid message
    NOT_STARTED = "not_started"
    REFUSED = "refused"  # the agent can't start the program as planned
    VERSIONS_DIFFER = "versions_differ"
    AGENT_ENDED = "agent_ended"  # before its Hello
    AGENT_SILENT = "agent_silent"  # it never sent a Hello
    LAUNCHER_KILLED = "launcher_killed"
    LAUNCHER_ENDED = "launcher_ended"  # before all ranks had reported
    CANCELLED = "cancelled"  # by a batch system


DIFFERENCES = frozenset({Kind.CALLS_DIFFER, Kind.SIZES_DIFFER, Kind.PEER_AHEAD})
"""Ranks call different operations, or with different sizes."""

CONSEQUENCES = frozenset(
    {
        Kind.PEER_ENDED,
        Kind.PEER_LEFT,
        Kind.CONNECTION_LOST,
        Kind.HOST_SILENT,
        Kind.STORE_GONE,
        Kind.STORE_SILENT,
        Kind.PEER_LATE,
        Kind.PEER_AWAITED,
        Kind.MESSAGE_MISSING,
        Kind.DATA_MISSING,
        Kind.ABORTED,
        Kind.TRANSPORT_FAILED,
        Kind.PEER_GONE,
    }
)
"""Another rank, host or store has ended, or has not answered."""


class Cause(NamedTuple):
    """A cause with its known fields; unknown fields are None.

    If the calls of two ranks differ, ``operations``, ``sizes``, ``roots`` and ``reductions`` are pairs.  The
    first element is what ``rank`` calls or sends, the second what the finder calls or expects.
    """

    kind: Kind
    rank: int | None = None  # the rank that the cause is about, numbered in the job
    host: str | None = None  # the host of ``rank``
    finder: int | None = None  # the rank that found the cause, if another rank reports it
    operation: str | None = None  # the finder's collective or message
    sequence: int | None = None  # the operation's number in its group
    operations: tuple[str, str] | None = None
    sizes: tuple[int, int] | None = None  # bytes
    roots: tuple[int, int] | None = None
    reductions: tuple[str, str] | None = None
    timeout: float | None = None  # seconds that the operation was allowed to take
    seconds: float | None = None  # without a message or without progress
    memory: float | None = None  # the program's peak in GiB
    program: str | None = None  # the program that ended
    signal: int | None = None  # that ended the program
    exit_code: int | None = None  # of the program
    detail: str | None = None  # text of the system, of a library, of ``rank``, or about a stall

    @property
    def is_consequence(self) -> bool:
        """Whether the failure only follows from another one, such as a peer's end."""
        return self.kind in CONSEQUENCES

    @property
    def differ(self) -> bool:
        """Whether ranks call different operations, or with different sizes."""
        return self.kind in DIFFERENCES

    def document(self) -> dict[str, Any]:
        """Return the known fields, for JSON."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @classmethod
    def from_document(cls, document: Mapping[str, Any] | None) -> Cause | None:
        """Read a cause from a message; None if its kind is unknown.  Fields of a wrong type become None."""
        document = document or {}
        if document.get("kind") not in [kind.value for kind in Kind]:
            return None
        fields: dict[str, Any] = {}
        for name, kind in _TYPES.items():
            value = document.get(name)
            if not isinstance(kind, tuple):
                fields[name] = value if type(value) is kind else None
            elif isinstance(value, (list, tuple)):
                fields[name] = tuple(value) if tuple(map(type, value)) == kind else None
        return cls(Kind(document["kind"]), **fields)


EXCEPTION = Cause(Kind.EXCEPTION)

_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("rank", "finder", "sequence", "signal", "exit_code"), int),
    **dict.fromkeys(("host", "operation", "program", "detail"), str),
    **dict.fromkeys(("timeout", "seconds", "memory"), float),
    **dict.fromkeys(("operations", "reductions"), (str, str)),
    **dict.fromkeys(("sizes", "roots"), (int, int)),
}
