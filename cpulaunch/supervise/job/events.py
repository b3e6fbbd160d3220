"""What can happen to a job (events), and what the launcher does about it (actions)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cpulaunch.messages import AgentMessage, Dump, Hello, LauncherMessage, Unknown
from cpulaunch.supervise.job.outcome import Stall
from cpulaunch.supervise.stalls.report import Explanation
from cpulaunch.supervise.stalls.snapshot import Seen
from cpulaunch.supervise.telemetry.rows import Row

# ---- events


class AgentConnected(NamedTuple):
    """A rank's agent has proved itself.  ``here``: it is on the launcher's host."""

    rank: int
    hello: Hello
    here: bool = False


class AgentSaid(NamedTuple):
    rank: int
    message: AgentMessage | Unknown


class AgentDisconnected(NamedTuple):
    """``error``: why the launcher has closed the connection; empty where the other end did."""

    rank: int
    error: str = ""


class ProcessSaid(NamedTuple):
    """A process of the launcher (mpiexec, or a local agent) has written this to its stdout or stderr."""

    data: bytes


class ProcessEnded(NamedTuple):
    """Process ``number`` of the launcher has ended, with a code as ``Popen.returncode`` gives it."""

    number: int
    code: int


class StartFailed(NamedTuple):
    """Process ``number``, an agent, couldn't be started."""

    number: int
    error: str


class NotStarted(NamedTuple):
    """The processes from ``first`` on, agents, have not been started, and won't be."""

    first: int


class UserSignal(NamedTuple):
    """The launcher got a signal that is to end the job."""

    number: int


class DumpWanted(NamedTuple):
    """Somebody wants to know what all ranks are doing."""

    native: bool


class Tick(NamedTuple):
    """Time has passed.  ``terminal_full``: agents had to wait, as the terminal takes nothing."""

    terminal_full: bool = False


Event = (
    AgentConnected
    | AgentSaid
    | AgentDisconnected
    | ProcessSaid
    | ProcessEnded
    | StartFailed
    | NotStarted
    | UserSignal
    | DumpWanted
    | Tick
)


# ---- actions


class Send(NamedTuple):
    """Send to the agent of a rank, if it is connected."""

    rank: int
    message: LauncherMessage


class Write(NamedTuple):
    """Show and keep what the program of a rank has written."""

    rank: int
    stream: int
    data: bytes


class HideStderr(NamedTuple):
    """Show nothing more of a rank's stderr; its log goes on."""

    rank: int


class Tell(NamedTuple):
    """Show the user a line."""

    line: str


class Log(NamedTuple):
    """Append to ``events.jsonl``."""

    entry: Mapping[str, Any]


class Record(NamedTuple):
    """Write these rows of telemetry, to wherever they go."""

    rows: Sequence[Row]


class ShowStatus(NamedTuple):
    """Let the terminal's last line be this."""

    text: str


class ReportStall(NamedTuple):
    """Show and keep what all ranks were seen to do in the stall with this number, from 1.

    ``begun``: the job has come to its first step.  ``brief``: a line stands for the box.
    """

    number: int
    stall: Stall
    explanation: Explanation
    seen: tuple[Seen, ...]
    begun: bool = True
    brief: bool = False


class ActOnStall(NamedTuple):
    """End the job, or an instance, that stalls, as was asked for; from ``Stalls`` to the state machine."""

    stall: Stall
    explanation: Explanation


class Dumped(NamedTuple):
    """What the ranks are doing is known: ``answers`` by rank; ``silent`` ones haven't answered."""

    native: bool
    answers: Mapping[int, Dump]
    silent: Sequence[int]


class EndProcesses(NamedTuple):
    """End the launcher's processes at once: there is no agent that could end anything."""


class Finish(NamedTuple):
    """All ranks have ended, or no more will be heard of them: clean up, and take the outcome."""


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
    | Dumped
    | EndProcesses
    | Finish
)
