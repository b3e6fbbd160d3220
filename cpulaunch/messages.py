"""Every message between a rank, its agent and the launcher.

Two connections carry them, one JSON object per line, its kind under ``type``:

====================  ============================================================  ===============
from → to             carried by                                                    kinds
====================  ============================================================  ===============
rank → agent          a pipe (``CPULAUNCH_REPORT_FD``), written by the bootstrap    ``FROM_RANK``
agent → launcher      one connection per rank, by TCP, or a Unix socket             ``FROM_AGENT``
launcher → agent      the same                                                      ``FROM_LAUNCHER``
====================  ============================================================  ===============

The launcher sends a ``Challenge`` as soon as an agent connects, the agent answers by ``Hello``, the launcher
by ``Welcome``; all other messages follow.  The token of their proofs travels in the environment: a process
that doesn't know it can neither send messages nor get any.  Times (``at``) are in seconds of the sender's
monotonic clock, which all processes of a host share, and nobody sets; ``AskTime`` and ``Time`` compare those
of two hosts.

Agents import this module when they start.  So it imports little, and evaluates its annotations, which
``wire.decode`` checks messages against: as texts, they would have to be compiled first.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

VERSION = 11
"""Of all this.  It changes with any kind, and any field that has no default.  ``Hello`` keeps its fields in
every version."""

BEATS_PER_TIMEOUT = 3
"""A rank is lost when as many beats in a row haven't come."""

UNREACHED = "cpulaunch: can't reach the launcher"
"""How an agent that no launcher hears begins its warning, after the rank's prefix."""


class Unknown(NamedTuple):
    """A message of a kind that this side doesn't know; never sent."""

    kind: str


# ---- rank → agent


class Ready(NamedTuple):
    """Python has started, and may run on these CPUs."""

    cpus: list[int]


class Torch(NamedTuple):
    """torch is imported, and has so many threads; ``requested`` is what the variables asked for by then."""

    threads: int
    requested: str


class Raised(NamedTuple):
    """An exception that nobody has caught: ``Type: message``, where in the user's code, and its traceback.

    An error of cpulaunch's own that the user can mend has no traceback, and may have a hint.  ``cause`` are
    the known fields of a `Cause`, where the program knows it.
    """

    error: str
    file: str | None
    line: int | None
    traceback: str
    hint: str
    cause: dict[str, Any] | None


class Aborts(NamedTuple):
    """C++ is about to abort the program, whose threads of Python are these, as in ``Dump.processes``."""

    threads: list[dict[str, Any]]


class Leaving(NamedTuple):
    """The program is about to end with this exit code."""

    code: int


class Resumes(NamedTuple):
    """The program has loaded the state after so many steps, and goes on from there."""

    step: int


class Saves(NamedTuple):
    """The state after so many steps is on disk; ``leaves``: the program ends now, because of a signal."""

    step: int
    leaves: bool


class SavesAt(NamedTuple):
    """From now on, the program takes these signals as the wish to save its state, and no others."""

    signals: list[int]


class Traces(NamedTuple):
    """The program traces from this step on."""

    request: int
    first: int


class HasTraced(NamedTuple):
    """The program has traced these steps, and written the file; ``error``: why it has not."""

    request: int
    first: int
    last: int
    error: str


# ---- agent → launcher


class Hello(NamedTuple):
    """Who connects.  The launcher proves itself by ``salt``; ``pid`` and ``host`` are the agent's."""

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
    """What the program has written to ``stream`` (1 is stdout, 2 is stderr), as ``pack`` makes it."""

    stream: int
    data: str


class Beat(NamedTuple):
    """A sign of life, and how far the program is, as ``ledger.Progress`` says, but for times in seconds.

    The defaults are those of a program that keeps no ledger and is silent.  ``printed`` are bytes;
    ``progressed_at`` is when anything of this last rose, None where nothing has; ``keeps_ledger``: its steps
    would be seen.  ``waits_since`` is when the oldest operation that is under way was called.  ``leaving``:
    the program has said that it ends (``Leaving``).  Sent regularly, as the answer to ``AskProgress``, and
    before ``Exit``.
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
    """``steps`` optimizer steps, up to that with ``number``, which ``ended_at``.

    ``fields`` are those of ``telemetry.OF_STEPS`` for all of these steps, in its order; None where nobody
    knows.
    """

    number: int
    steps: int
    ended_at: float
    fields: list[float | None]


class Steps(NamedTuple):
    """What the program's steps took, what the kernel says of it, and once, what its cores can do.

    ``at`` is when this was looked at; ``rows`` are ``StepRow`` as lists, each of them told once.
    ``process`` has fields of a row of telemetry.jsonl, or none; ``peak`` is in FLOP/s.
    """

    at: float
    rows: list[list[Any]]
    process: dict[str, Any]
    peak: float | None
    precision: str


class Time(NamedTuple):
    """The answer to ``AskTime``, at once."""

    at: float


class Dump(NamedTuple):
    """The answer to ``AskDump`` with the same ``request``: what the program is doing.

    ``groups`` are those of its ledger (``ledger.Group`` as dicts, times in seconds), ``processes`` the
    program (first) and its children, as ``agent.observe.dump`` describes them.  ``at`` is when it was looked
    at.
    ``error``: why something could not be seen; empty where all could.
    """

    request: int
    at: float
    groups: list[dict[str, Any]]
    processes: list[dict[str, Any]]
    error: str


class Failure(NamedTuple):
    """What a rank's ``Raised`` said.  ``by_launcher``: the launcher had wanted the program to end by then.

    ``groups`` are those of its ledger, as in ``Dump``; of ``ccl``, which knows when an operation has ended,
    only groups in which one has failed or was under way.
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
    """What the program really has, first when Python has started, then when torch is imported.

    None: not looked at by then, or not known.
    """

    cpus: str
    memory_policy: str | None
    preloaded: list[str] | None
    torch_threads: int | None


class Note(NamedTuple):
    """A warning for the user."""

    note: str


class Resumed(NamedTuple):
    """What a rank's ``Resumes`` said."""

    step: int


class Saved(NamedTuple):
    """What a rank's ``Saves`` said."""

    step: int
    leaves: bool


class Tracing(NamedTuple):
    """What a rank's ``Traces`` said."""

    request: int
    first: int


class Traced(NamedTuple):
    """A trace of these steps can be had by ``SendTrace``: ``size`` bytes.  ``error``: why there is none."""

    request: int
    first: int
    last: int
    size: int
    error: str


class TracePiece(NamedTuple):
    """The answer to ``SendTrace``: the next bytes of the trace, compressed by gzip, in base 64.

    ``last``: there are no more.  ``error``: they can't be read.
    """

    request: int
    data: str
    last: bool
    error: str


class Refused(NamedTuple):
    """The program was not started, or is not where it should be and was ended."""

    error: str


class Exit(NamedTuple):
    """The program has ended, by an exit code or a signal; the agent waits for ``Release``.

    ``by_launcher``: the launcher had wanted it to end by then, so that this is no failure of its own, unless
    it had ``finished``: its script had ended before, with this code, at this time.  ``by_signal`` is the
    signal by which somebody else did, or 0.  ``cause`` are the known fields of a `Cause`.
    ``unexplained``: its Python has not said that it would (``Leaving``).  ``groups`` are as those of
    ``Failure``, if it was a signal of its own, and ``threads`` what its ``Aborts`` said, if it did.  If it
    has ended by itself otherwise, ``groups`` are those of ``ccl`` whose last collective was completed, with
    that.
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
        """Whether the program has ended like this by itself."""
        return self.finished or not self.by_launcher


# ---- launcher → agent


class Challenge(NamedTuple):
    """Prove that you know the token."""

    salt: str


class Welcome(NamedTuple):
    """You are heard, and this is the launcher."""

    proof: str


class AskTime(NamedTuple):
    """What does your clock show?"""


class AskProgress(NamedTuple):
    """How far is the program?  Answered by a ``Beat``, at once."""


class AskDump(NamedTuple):
    """What is the program doing?

    ``native``: show frames of C and C++, too, which takes longer.  ``fresh``: the ledger has to have all
    collectives by then, for which it may wait.
    """

    request: int
    native: bool
    fresh: bool = False


class Trace(NamedTuple):
    """Let the program trace these steps.  Where ``first`` is 0, drop the trace that was asked for before."""

    request: int
    first: int
    last: int


class SendTrace(NamedTuple):
    """Send the next piece of the trace.  There is one at a time on its way."""

    request: int


class End(NamedTuple):
    """Send the program this signal, and kill it after ``grace`` seconds.

    ``failed``: the job has failed, so that there is no state to save any more.  A program that would take the
    signal as the wish to save (``SavesAt``) is killed at once.
    """

    signal: int
    grace: float
    failed: bool = False


class Release(NamedTuple):
    """The end of the program was heard; the agent may go."""


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
)
LauncherMessage = Challenge | Welcome | AskTime | AskProgress | AskDump | Trace | SendTrace | End | Release
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
}
FROM_LAUNCHER: Mapping[str, type[LauncherMessage]] = {
    "challenge": Challenge,
    "welcome": Welcome,
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
"""Class → kind.  The three tables share no kind, so nobody can speak as somebody else."""
