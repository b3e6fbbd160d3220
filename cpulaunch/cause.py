"""Why a rank has failed, as data.

Programs, agents and the process group ``ccl`` report causes.  The launcher decides by them which failure came
first, and whether the job is started again.  `supervise.job.sentences` makes sentences of them, and
``ccl/csrc/core/cause.cpp`` those of ccl's exceptions; no program reads these.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple


class Kind(str, Enum):
    """What kind of a cause it is."""

    # A program's own.
    EXCEPTION = "exception"
    USAGE_ERROR = "usage_error"  # what the script asks of cpulaunch can't be done
    EXIT = "exit"  # it has chosen an exit code
    UNEXPLAINED_EXIT = "unexplained_exit"  # neither an exception nor sys.exit has
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"  # perhaps out of memory
    KILLED_BY_OTHERS = "killed_by_others"  # not out of memory
    STALLED = "stalled"

    # Of ccl, as in ccl/csrc/core/cause.hpp.
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

    # Of other libraries: a peer is gone, or has not answered.
    PEER_GONE = "peer_gone"

    # Of agents, hosts and the launcher's processes.
    HOST_LOST = "host_lost"
    HOST_FAILED = "host_failed"  # as the batch system says
    AGENT_KILLED = "agent_killed"
    AGENT_SIGNALED = "agent_signaled"  # by mpiexec or a batch system
    AGENT_MALFORMED = "agent_malformed"  # what it says can't be understood
    NOT_STARTED = "not_started"
    REFUSED = "refused"  # by the agent, as the program can't be started as planned
    VERSIONS_DIFFER = "versions_differ"
    AGENT_ENDED = "agent_ended"  # before it said hello
    AGENT_SILENT = "agent_silent"  # it has never said hello
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
"""Somebody else has gone, or has not come."""


class Cause(NamedTuple):
    """A cause and what is known of it; all else is None.

    ``rank`` is the job's rank that it is about, on ``host``.  ``finder`` is the rank that has found it, where
    another one reports it.  ``operation`` is the finder's, with its ``sequence`` number in the group.  Where
    two ranks differ, ``operations``, ``sizes`` (in bytes), ``roots`` and ``reductions`` are what ``rank``
    calls or sends, and what the finder calls or expects.  ``timeout`` is that of an operation which took
    longer, in seconds.  For so many ``seconds``, nothing was heard or done.  ``memory`` is the most that the
    program had, in GiB.  ``program`` was ended by a ``signal``, or with ``exit_code``.  ``detail`` are words
    of others: the system, a library, or what ``rank`` says that it calls.
    """

    kind: Kind
    rank: int | None = None
    host: str | None = None
    finder: int | None = None
    operation: str | None = None
    sequence: int | None = None
    operations: tuple[str, str] | None = None
    sizes: tuple[int, int] | None = None
    roots: tuple[int, int] | None = None
    reductions: tuple[str, str] | None = None
    timeout: float | None = None
    seconds: float | None = None
    memory: float | None = None
    program: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    detail: str | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether it says no more than that somebody else has gone."""
        return self.kind in CONSEQUENCES

    @property
    def differ(self) -> bool:
        """Whether it says that ranks call different operations, or with different sizes."""
        return self.kind in DIFFERENCES

    def document(self) -> dict[str, Any]:
        """What is known, for JSON."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @classmethod
    def from_document(cls, said: Mapping[str, Any] | None) -> Cause | None:
        """The cause of a message, which anybody may have sent; None where there is none that makes sense."""
        said = said or {}
        if said.get("kind") not in [kind.value for kind in Kind]:
            return None
        fields: dict[str, Any] = {}
        for name, kind in _TYPES.items():
            value = said.get(name)
            if not isinstance(kind, tuple):
                fields[name] = value if type(value) is kind else None
            elif isinstance(value, (list, tuple)):
                fields[name] = tuple(value) if tuple(map(type, value)) == kind else None
        return cls(Kind(said["kind"]), **fields)


EXCEPTION = Cause(Kind.EXCEPTION)

_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("rank", "finder", "sequence", "signal", "exit_code"), int),
    **dict.fromkeys(("host", "operation", "program", "detail"), str),
    **dict.fromkeys(("timeout", "seconds", "memory"), float),
    **dict.fromkeys(("operations", "reductions"), (str, str)),
    **dict.fromkeys(("sizes", "roots"), (int, int)),
}
