"""The messages between ranks, agents and the launcher.

A message is a line with a JSON object, whose key ``type`` is the message's kind.  Kinds by sender:

====================  ============================================================  ===============
from → to             carried by                                                    kinds
====================  ============================================================  ===============
rank → agent          a pipe (``CPULAUNCH_REPORT_FD``), written by the bootstrap    ``FROM_RANK``
agent → launcher      one connection per rank, by TCP, or a Unix socket             ``FROM_AGENT``
launcher → agent      the same                                                      ``FROM_LAUNCHER``
====================  ============================================================  ===============

The launcher sends a ``Challenge`` when an agent connects.  The agent answers with ``Hello``, and the launcher
with ``Welcome`` and ``LauncherReceipt``.  All other messages follow.  In this handshake, both ends prove that
they know the job's token, which ranks and agents have in their environment.

If a connection breaks, the agent connects again.  Each end reports how many messages it has received, without
handshakes and receipts, and sends the messages that the other end lacks.

Times (``at``) are in seconds of the sender's monotonic clock, which is the same for all processes of a host.
``AskTime`` and ``Time`` compare the clocks of two hosts.

Agents import this module when they start, so it imports little.  It doesn't postpone the evaluation of
annotations, since ``wire.decode`` checks messages against them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

VERSION = 12
"""Version of the protocol.  It changes if a kind, or a field without a default, is added, removed or changed.
``Hello`` has the same fields in all versions."""

BEATS_PER_TIMEOUT = 3
"""Number of beats that an agent sends within ``heartbeat_timeout``."""

UNREACHED = "cpulaunch: can't reach the launcher"
"""Beginning of an agent's warning, after the rank's prefix, that it can't reach the launcher."""


class Unknown(NamedTuple):
    """A received message of an unknown kind."""

    kind: str


# ---- rank → agent


class Ready(NamedTuple):
    """Python has started; its affinity mask is ``cpus``."""

    cpus: list[int]


class Torch(NamedTuple):
    """torch is imported and has ``threads`` threads; its variables requested ``requested`` threads."""

    threads: int
    requested: str


class Raised(NamedTuple):
    """An uncaught exception.

    ``error`` is ``Type: message``; ``file`` and ``line`` are the place in the user's code.  For an error of
    cpulaunch that the user can correct, ``traceback`` is empty, and ``hint`` may be set.  ``cause`` has the
    known fields of a `Cause`, or is None.
    """

    error: str
    file: str | None
    line: int | None
    traceback: str
    hint: str
    cause: dict[str, Any] | None


class Aborts(NamedTuple):
    """C++ is about to abort the program; ``threads`` are its Python threads, as in ``Dump.processes``."""

    threads: list[dict[str, Any]]


class Leaving(NamedTuple):
    """The program is about to end with this exit code."""

    code: int


class Resumes(NamedTuple):
    """The program has loaded a checkpoint of step ``step``, and continues from it."""

    step: int


class Saves(NamedTuple):
    """A checkpoint of step ``step`` is on disk; ``leaves``: the program ends now, because of a signal."""

    step: int
    leaves: bool


class SavesAt(NamedTuple):
    """From now on, the program saves a checkpoint when it receives one of ``signals``."""

    signals: list[int]


class Traces(NamedTuple):
    """The program traces, beginning with step ``first``."""

    request: int
    first: int


class HasTraced(NamedTuple):
    """The program has written the trace of steps ``first`` to ``last``; ``error``: why it could not."""

    request: int
    first: int
    last: int
    error: str


# ---- agent → launcher


class Hello(NamedTuple):
    """The agent of ``rank`` connects, with process ``pid`` on ``host``.

    ``proof`` answers the ``Challenge``.  The launcher answers ``salt`` in ``Welcome``.
    """

    version: int
    rank: int
    salt: str
    proof: str
    at: float
    pid: int
    host: str


class Started(NamedTuple):
    """The program has started on ``cores`` and ``comm_cores``, in folded lists; ``notes`` are warnings."""

    pid: int
    cores: str
    comm_cores: str
    threads: int
    notes: list[str]


class Output(NamedTuple):
    """Output of the program to ``stream`` (1 is stdout, 2 is stderr), encoded by ``wire.pack``."""

    stream: int
    data: str


class Beat(NamedTuple):
    """A heartbeat with the program's progress: the fields of ``ledger.Progress``, with times in seconds.

    It is sent regularly, as the answer to ``AskProgress``, and before ``Exit``.
    """

    steps: int = 0
    collectives: int = 0
    longest_gap: float = 0.0
    waiting: float = 0.0
    expects_steps: bool = False
    printed: int = 0  # bytes of output
    progressed_at: float | None = None  # when steps, collectives or printed last rose
    keeps_ledger: bool = False  # the program counts its steps in a ledger
    waits_since: float | None = None  # when the oldest pending operation was called
    leaving: bool = False  # the program has sent ``Leaving``


class StepRow(NamedTuple):
    """Telemetry of ``steps`` optimizer steps.  The last one has the ``number`` and ended at ``ended_at``.

    ``fields`` has a value for each field of ``telemetry.OF_STEPS``; unknown values are None.
    """

    number: int
    steps: int
    ended_at: float
    fields: list[float | None]


class Steps(NamedTuple):
    """Telemetry of the program's steps and of its process."""

    at: float  # when the values were read
    rows: list[list[Any]]  # ``StepRow`` as lists; each row is sent once
    process: dict[str, Any]  # fields of ``telemetry.OF_PROCESSES``
    peak: float | None  # of the rank's cores in FLOP/s; sent once
    precision: str  # of the peak


class Time(NamedTuple):
    """The immediate answer to ``AskTime``."""

    at: float


class Dump(NamedTuple):
    """The answer to ``AskDump``: the program's stacks and collectives."""

    request: int  # number of the ``AskDump``
    at: float
    groups: list[dict[str, Any]]  # process groups in its ledger: ``ledger.Group``, with times in seconds
    processes: list[dict[str, Any]]  # the program and its children, as `agent.observe.dump` describes them
    error: str  # why something is missing; empty if nothing is


class Failure(NamedTuple):
    """A rank's ``Raised``.  ``by_launcher``: the launcher had asked the program to end before.

    ``groups`` are process groups in its ledger, as in ``Dump``.  Groups of ``ccl`` are included only if an
    operation is pending or has failed.
    """

    error: str
    file: str | None
    line: int | None
    traceback: str
    hint: str
    cause: dict[str, Any] | None
    at: float
    by_launcher: bool
    groups: list[dict[str, Any]]


class Found(NamedTuple):
    """The program's actual resources, when Python has started, and again when torch is imported.

    A value is None if it is not known, or not known yet.
    """

    cpus: str
    memory_policy: str | None
    preloaded: list[str] | None
    torch_threads: int | None


class Note(NamedTuple):
    """A warning for the user."""

    note: str


class Resumed(NamedTuple):
    """A rank's ``Resumes``."""

    step: int


class Saved(NamedTuple):
    """A rank's ``Saves``."""

    step: int
    leaves: bool


class Tracing(NamedTuple):
    """A rank's ``Traces``."""

    request: int
    first: int


class Traced(NamedTuple):
    """The trace of these steps can be fetched by ``SendTrace``; ``error``: why there is none."""

    request: int
    first: int
    last: int
    size: int
    error: str


class TracePiece(NamedTuple):
    """The answer to ``SendTrace``: the next bytes of the trace, compressed by gzip and encoded in base 64."""

    request: int
    data: str
    last: bool  # this is the last piece
    error: str  # why the file can't be read


class Refused(NamedTuple):
    """The program was not started, or was ended because its placement differs from the plan."""

    error: str


class Exit(NamedTuple):
    """The program has ended by an exit code or a signal.  The agent waits for ``Release``.

    ``groups`` and ``threads`` are set if the program ended by itself.  After a signal, ``groups`` are as in
    ``Failure``.  After an exit code, they are the groups of ``ccl`` without a pending collective, each with
    its last collective.
    """

    code: int | None
    signal: int | None
    at: float
    by_launcher: bool  # the launcher had asked the program to end before
    by_signal: int  # the signal by which another process asked the program to end, or 0
    cause: dict[str, Any] | None  # known fields of a `Cause`
    unexplained: bool = False  # Python has not sent ``Leaving``
    groups: list[dict[str, Any]] | None = None
    threads: list[dict[str, Any]] | None = None  # those of ``Aborts``
    finished: bool = False  # the script had ended before the process; code and at are the script's

    @property
    def own(self) -> bool:
        """Whether the program has ended by itself."""
        return self.finished or not self.by_launcher


class Receipt(NamedTuple):
    """The agent has received ``total`` messages of the launcher."""

    total: int


# ---- launcher → agent


class Challenge(NamedTuple):
    """Asks the agent for a proof, computed from ``salt``, that it knows the token."""

    salt: str


class Welcome(NamedTuple):
    """The agent is accepted; ``proof`` authenticates the launcher."""

    proof: str


class LauncherReceipt(NamedTuple):
    """The launcher has received ``total`` messages of this agent, over all its connections."""

    total: int


class AskTime(NamedTuple):
    """Asks for the time of the agent's clock."""


class AskProgress(NamedTuple):
    """Asks for the program's progress.  The agent answers with a ``Beat`` at once."""


class AskDump(NamedTuple):
    """Asks for the program's stacks and collectives.

    ``native``: include frames of C and C++, which takes longer.  ``fresh``: wait until the ledger has all
    collectives of other backends, which are copied at intervals.
    """

    request: int
    native: bool
    fresh: bool = False


class Trace(NamedTuple):
    """Let the program trace steps ``first`` to ``last``; a ``first`` of 0 cancels the trace."""

    request: int
    first: int
    last: int


class SendTrace(NamedTuple):
    """Send the next piece of the trace.  The launcher requests one piece at a time."""

    request: int


class End(NamedTuple):
    """Send the program ``signal``, and kill it after ``grace`` seconds.

    ``failed``: the job has failed, so checkpoints can't be saved.  A program that would save one on this
    signal (``SavesAt``) is killed at once.
    """

    signal: int
    grace: float
    failed: bool = False


class Release(NamedTuple):
    """The launcher has received ``Exit``; the agent may exit."""


Report = Ready | Torch | Raised | Aborts | Leaving | Resumes | Saves | SavesAt | Traces | HasTraced
TraceMessage = Tracing | Traced | TracePiece
AgentMessage = (
    Hello | Started | Output | Beat | Steps | Time | Dump | Failure | Found | Note | Resumed | Saved
    | TraceMessage | Refused | Exit | Receipt
)  # fmt: skip
LauncherMessage = (
    Challenge | Welcome | LauncherReceipt | AskTime | AskProgress | AskDump | Trace | SendTrace | End
    | Release
)  # fmt: skip
Message = Report | AgentMessage | LauncherMessage

FROM_RANK: Mapping[str, type[Report]] = {
    "ready": Ready,
    "torch": Torch,
    "raised": Raised,
    "aborts": Aborts,
    "leaving": Leaving,
    "resumes": Resumes,
    "saves": Saves,
    "saves_at": SavesAt,
    "traces": Traces,
    "has_traced": HasTraced,
}
FROM_AGENT: Mapping[str, type[AgentMessage]] = {
    "hello": Hello,
    "started": Started,
    "output": Output,
    "beat": Beat,
    "steps": Steps,
    "time": Time,
    "dump": Dump,
    "failure": Failure,
    "found": Found,
    "note": Note,
    "resumed": Resumed,
    "saved": Saved,
    "tracing": Tracing,
    "traced": Traced,
    "trace_piece": TracePiece,
    "refused": Refused,
    "exit": Exit,
    "receipt": Receipt,
}
FROM_LAUNCHER: Mapping[str, type[LauncherMessage]] = {
    "challenge": Challenge,
    "welcome": Welcome,
    "launcher_receipt": LauncherReceipt,
    "ask_time": AskTime,
    "ask_progress": AskProgress,
    "ask_dump": AskDump,
    "trace": Trace,
    "send_trace": SendTrace,
    "end": End,
    "release": Release,
}
KINDS: Mapping[type[Message], str] = {
    cls: kind for kinds in (FROM_RANK, FROM_AGENT, FROM_LAUNCHER) for kind, cls in kinds.items()
}
"""Class → kind.  A kind has one sender, so no sender can send another's messages."""
