"""Every message between a rank, its agent and the launcher.

Messages are JSON objects, one per line, with their kind under ``type``.  They take two connections:

====================  ============================================================  ===============
from → to             carried by                                                    kinds
====================  ============================================================  ===============
rank → agent          a pipe (``CPULAUNCH_REPORT_FD``), written by the bootstrap    ``FROM_RANK``
agent → launcher      one connection per rank, by TCP, or a Unix socket             ``FROM_AGENT``
launcher → agent      the same                                                      ``FROM_LAUNCHER``
====================  ============================================================  ===============

The launcher sends a ``Challenge`` as soon as an agent connects.  The agent answers with ``Hello``, and the
launcher with ``Welcome`` and ``LauncherReceipt``; all other messages follow.  An agent whose connection the
network has broken connects again.  Each end then says how many messages it has received, and sends again what
the other hasn't: handshakes and receipts don't count.  Both sides prove that they know the job's token, which
the environment carries: a process that doesn't know it can neither send nor receive messages.  Times (``at``)
are in seconds of the sender's monotonic clock.  All processes of a host share this clock, and nobody can set
it; ``AskTime`` and ``Time`` compare the clocks of two hosts.

Agents import this module when they start, so it imports little.  Its annotations are evaluated, as
``wire.decode`` checks messages against them: annotations kept as strings would have to be compiled first.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

VERSION = 12
"""The protocol's version.  It changes with any kind, and with any field that has no default.  ``Hello`` has
the same fields in every version."""

BEATS_PER_TIMEOUT = 3
"""How many beats an agent sends in ``heartbeat_timeout``."""

UNREACHED = "cpulaunch: can't reach the launcher"
"""The start of the warning of an agent that can't reach the launcher, after the rank's prefix."""


class Unknown(NamedTuple):
    """A received message of a kind that this side doesn't know; never sent."""

    kind: str


# ---- rank → agent


class Ready(NamedTuple):
    """Python has started, and may run on ``cpus``."""

    cpus: list[int]


class Torch(NamedTuple):
    """torch is imported and uses ``threads`` threads; ``requested`` is what the variables then asked for."""

    threads: int
    requested: str


class Raised(NamedTuple):
    """An uncaught exception.

    ``error`` is ``Type: message``, and ``file`` and ``line`` are its place in the user's code.  An error of
    cpulaunch's own that the user can correct has no ``traceback``, and may have a ``hint``.  ``cause`` has
    the known fields of a `Cause`, if the program knows the cause.
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
    """The program has loaded the state after ``step`` steps, and goes on from there."""

    step: int


class Saves(NamedTuple):
    """The state after ``step`` steps is on disk; ``leaves``: the program ends now, because of a signal."""

    step: int
    leaves: bool


class SavesAt(NamedTuple):
    """From now on, the program saves its state when it gets one of ``signals``, and no other signal."""

    signals: list[int]


class Traces(NamedTuple):
    """The program traces from step ``first`` on."""

    request: int
    first: int


class HasTraced(NamedTuple):
    """The program has traced steps ``first`` to ``last`` and written the file; ``error``: why it has not."""

    request: int
    first: int
    last: int
    error: str


# ---- agent → launcher


class Hello(NamedTuple):
    """The agent of ``rank`` connects, with process ``pid`` on ``host``.

    ``proof`` answers the ``Challenge``; the launcher's own proof in ``Welcome`` is of ``salt``.
    """

    version: int
    rank: int
    salt: str
    proof: str
    at: float
    pid: int
    host: str


class Started(NamedTuple):
    """The program runs.  ``cores`` and ``comm_cores`` are folded lists, ``notes`` warnings for the user."""

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

    Sent regularly, as the answer to ``AskProgress``, and before ``Exit``.  The defaults describe a program
    that keeps no ledger and prints nothing.  ``printed`` is in bytes.  ``progressed_at`` is when any of these
    counts last rose, or None.  ``keeps_ledger``: the program's steps would be seen.  ``waits_since`` is when
    the oldest operation under way was called.  ``leaving``: the program has announced its end (``Leaving``).
    """

    steps: int = 0
    collectives: int = 0
    longest_gap: float = 0.0
    waiting: float = 0.0
    expects_steps: bool = False
    printed: int = 0
    progressed_at: float | None = None
    keeps_ledger: bool = False
    waits_since: float | None = None
    leaving: bool = False


class StepRow(NamedTuple):
    """``steps`` optimizer steps, up to the step ``number``, which ended at ``ended_at``.

    ``fields`` are the values of ``telemetry.OF_STEPS`` for all of these steps, in its order; unknown values
    are None.
    """

    number: int
    steps: int
    ended_at: float
    fields: list[float | None]


class Steps(NamedTuple):
    """Telemetry: the program's steps, the kernel's figures of its process and, once, the peak of its cores.

    ``at`` is when the values were read.  ``rows`` are ``StepRow`` as lists; each row is sent once.
    ``process`` has fields of a row of telemetry.jsonl, or is empty.  ``peak`` is in FLOP/s at ``precision``.
    """

    at: float
    rows: list[list[Any]]
    process: dict[str, Any]
    peak: float | None
    precision: str


class Time(NamedTuple):
    """The immediate answer to ``AskTime``."""

    at: float


class Dump(NamedTuple):
    """The answer to ``AskDump`` with the same ``request``: what the program is doing.

    ``groups`` are the process groups in its ledger (``ledger.Group`` as dicts, times in seconds).
    ``processes`` are the program (first) and its children, as ``agent.observe.dump`` describes them.  ``at``
    is when they were observed.  ``error`` says why something could not be observed; empty if all was.
    """

    request: int
    at: float
    groups: list[dict[str, Any]]
    processes: list[dict[str, Any]]
    error: str


class Failure(NamedTuple):
    """A rank's ``Raised``.  ``by_launcher``: the launcher had already asked the program to end.

    ``groups`` are the process groups in its ledger, as in ``Dump``.  Groups of ``ccl``, which records the end
    of operations, are left out unless an operation in them has failed or was under way.
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
    """The program's actual resources.  Sent when Python has started, and again when torch is imported.

    None: not yet looked at, or not known.
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
    """``SendTrace`` fetches the trace of these steps: ``size`` bytes.  ``error``: why there is none."""

    request: int
    first: int
    last: int
    size: int
    error: str


class TracePiece(NamedTuple):
    """The answer to ``SendTrace``: the next bytes of the trace, compressed by gzip, in base 64.

    ``last``: this is the last piece.  ``error``: why the file can't be read.
    """

    request: int
    data: str
    last: bool
    error: str


class Refused(NamedTuple):
    """The program was not started, or was ended because it is not where it should be."""

    error: str


class Exit(NamedTuple):
    """The program has ended, by an exit code or a signal; the agent waits for ``Release``.

    ``finished``: the script had ended before, and ``code`` and ``at`` are those of its end.  ``by_launcher``:
    the launcher had already asked the program to end, so unless it had finished, this is no failure of its
    own.  ``by_signal`` is the signal by which another process asked the program to end, or 0.  ``cause`` has
    the known fields of a `Cause`.  ``unexplained``: Python has not announced the end (``Leaving``).

    ``groups`` and ``threads`` are those of a program that ended by itself.  After a signal, ``groups`` are as
    in ``Failure``; after an exit code, they are the groups of ``ccl`` whose last collective was completed,
    with that collective.  ``threads`` are those of its ``Aborts``, if it sent that.
    """

    code: int | None
    signal: int | None
    at: float
    by_launcher: bool
    by_signal: int
    cause: dict[str, Any] | None
    unexplained: bool = False
    groups: list[dict[str, Any]] | None = None
    threads: list[dict[str, Any]] | None = None
    finished: bool = False

    @property
    def own(self) -> bool:
        """Whether the program has ended by itself."""
        return self.finished or not self.by_launcher


class Receipt(NamedTuple):
    """The agent has received the launcher's first ``total`` messages."""

    total: int


# ---- launcher → agent


class Challenge(NamedTuple):
    """Asks the agent to prove, by ``salt``, that it knows the token."""

    salt: str


class Welcome(NamedTuple):
    """The agent is accepted; ``proof`` proves that this is the launcher."""

    proof: str


class LauncherReceipt(NamedTuple):
    """The launcher has received this agent's first ``total`` messages, over all its connections."""

    total: int


class AskTime(NamedTuple):
    """Asks for the time of the agent's clock."""


class AskProgress(NamedTuple):
    """Asks for the program's progress.  The agent answers with a ``Beat`` at once."""


class AskDump(NamedTuple):
    """Asks what the program is doing.

    ``native``: show frames of C and C++, too, which takes longer.  ``fresh``: the ledger must have all
    collectives up to now; the agent may wait for that.
    """

    request: int
    native: bool
    fresh: bool = False


class Trace(NamedTuple):
    """Let the program trace steps ``first`` to ``last``.  If ``first`` is 0, drop the requested trace."""

    request: int
    first: int
    last: int


class SendTrace(NamedTuple):
    """Send the next piece of the trace.  Only one piece at a time is under way."""

    request: int


class End(NamedTuple):
    """Send the program ``signal``, and kill it after ``grace`` seconds.

    ``failed``: the job has failed, so no state can be saved any more.  A program that would save its state on
    this signal (``SavesAt``) is killed at once.
    """

    signal: int
    grace: float
    failed: bool = False


class Release(NamedTuple):
    """The launcher knows of the program's end; the agent may exit."""


Report = Ready | Torch | Raised | Aborts | Leaving | Resumes | Saves | SavesAt | Traces | HasTraced
TraceMessage = Tracing | Traced | TracePiece
AgentMessage = (
    Hello
    | Started
    | Output
    | Beat
    | Steps
    | Time
    | Dump
    | Failure
    | Found
    | Note
    | Resumed
    | Saved
    | TraceMessage
    | Refused
    | Exit
    | Receipt
)
LauncherMessage = (
    Challenge
    | Welcome
    | LauncherReceipt
    | AskTime
    | AskProgress
    | AskDump
    | Trace
    | SendTrace
    | End
    | Release
)
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
"""Class → kind.  The three tables share no kind, so no sender can send the message of another."""
