"""Events that can happen to a job, and actions that the launcher takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cpulaunch.messages import AgentMessage, Dump, Hello, LauncherMessage, Unknown
from cpulaunch.supervise.job.outcome import Stall
from cpulaunch.supervise.stalls.report import Explanation
from cpulaunch.supervise.stalls.snapshot import Snapshot
from cpulaunch.supervise.telemetry.rows import Row

# ---- events


class AgentConnected(NamedTuple):
    """A rank's agent has connected and authenticated.  ``here``: it is on the launcher's host."""

    rank: int
    hello: Hello
    here: bool = False


class AgentSent(NamedTuple):
    rank: int
    message: AgentMessage | Unknown


class AgentReconnected(NamedTuple):
    """A rank's agent has connected again after a network failure."""

    rank: int


class AgentDisconnected(NamedTuple):
    """An agent's connection is closed.  ``error``: why the launcher closed it; empty if the agent did."""

    rank: int
    error: str = ""


class ProcessPrinted(NamedTuple):
    """A process of the launcher (mpiexec or a local agent) has written ``data`` to its stdout or stderr."""

    data: bytes


class ProcessEnded(NamedTuple):
    """Process ``number`` of the launcher has ended; ``code`` is its ``Popen.returncode``."""

    number: int
    code: int


class StartFailed(NamedTuple):
    """Agent ``number`` couldn't be started."""

    number: int
    error: str


class NotStarted(NamedTuple):
    """The agents from number ``first`` on were not started, and won't be."""

    first: int


class UserSignal(NamedTuple):
    """The launcher got a signal that ends the job."""

    number: int


class DumpRequested(NamedTuple):
    """A client asks what all ranks are doing; ``native``: with frames of C and C++."""

    native: bool


class Tick(NamedTuple):
    """Time has passed.  ``terminal_full``: agents had to wait, because the terminal accepts no output."""

    terminal_full: bool = False


Event = (
    AgentConnected
    | AgentSent
    | AgentReconnected
    | AgentDisconnected
    | ProcessPrinted
    | ProcessEnded
    | StartFailed
    | NotStarted
    | UserSignal
    | DumpRequested
    | Tick
)


# ---- actions


class Send(NamedTuple):
    """Send a message to a rank's agent, if it is connected."""

    rank: int
    message: LauncherMessage


class Write(NamedTuple):
    """Show and log the output of a rank's program."""

    rank: int
    stream: int
    data: bytes


class HideStderr(NamedTuple):
    """Stop showing a rank's stderr; it is still logged."""

    rank: int


class Tell(NamedTuple):
    """Show the user a line."""

    line: str


class Log(NamedTuple):
    """Append an entry to ``events.jsonl``."""

    entry: Mapping[str, Any]


class Record(NamedTuple):
    """Write rows of telemetry to all sinks."""

    rows: Sequence[Row]


class ShowStatus(NamedTuple):
    """Show ``text`` as the terminal's last line."""

    text: str


class ReportStall(NamedTuple):
    """Show and keep the report of stall ``number``, counted from 1.

    ``snapshots`` has all ranks.  ``begun``: the job has reached its first step.  ``brief``: show a line
    instead of the box.
    """

    number: int
    stall: Stall
    explanation: Explanation
    snapshots: tuple[Snapshot, ...]
    begun: bool = True
    brief: bool = False


class ActOnStall(NamedTuple):
    """End the stalled job or instance, as ``--stall-action`` requests.  The state machine handles it."""

    stall: Stall
    explanation: Explanation


class DumpFinished(NamedTuple):
    """Pass on the ranks' dumps: ``answers`` by rank.  Ranks in ``silent`` haven't answered."""

    native: bool
    answers: Mapping[int, Dump]
    silent: Sequence[int]


class EndProcesses(NamedTuple):
    """End the launcher's processes at once, because no agent has connected."""


class Finish(NamedTuple):
    """Clean up and take the outcome, because all ranks have ended or can't be reached."""


Action = (
    Send
    | Write
    | HideStderr
    | Tell
    | Log
    | Record
    | ShowStatus
    | ReportStall
    | ActOnStall
    | DumpFinished
    | EndProcesses
    | Finish
)
