"""What can happen to a job (events), and what the launcher does about it (actions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpulaunch.messages import AgentMessage, Hello, LauncherMessage, Unknown

# ---- events


@dataclass(frozen=True)
class AgentConnected:
    """A rank's agent has proved itself."""

    rank: int
    hello: Hello


@dataclass(frozen=True)
class AgentSaid:
    rank: int
    message: AgentMessage | Unknown


@dataclass(frozen=True)
class AgentDisconnected:
    """``error``: why the launcher has closed the connection; empty where the other end did."""

    rank: int
    error: str = ""


@dataclass(frozen=True)
class ProcessSaid:
    """A process of the launcher (mpiexec, or a local agent) has written this to its stdout or stderr."""

    data: bytes


@dataclass(frozen=True)
class ProcessEnded:
    """Process ``number`` of the launcher has ended, with a code as ``Popen.returncode`` gives it."""

    number: int
    code: int


@dataclass(frozen=True)
class UserSignal:
    """The launcher got a signal that is to end the job."""

    number: int


@dataclass(frozen=True)
class Tick:
    """Time has passed.  ``terminal_full``: agents had to wait, as the terminal takes nothing."""

    terminal_full: bool = False


Event = AgentConnected | AgentSaid | AgentDisconnected | ProcessSaid | ProcessEnded | UserSignal | Tick


# ---- actions


@dataclass(frozen=True)
class Send:
    """Send to the agent of a rank, if it is connected."""

    rank: int
    message: LauncherMessage


@dataclass(frozen=True)
class Write:
    """Show and keep what the program of a rank has written."""

    rank: int
    stream: int
    data: bytes


@dataclass(frozen=True)
class HideStderr:
    """Show nothing more of a rank's stderr; its log goes on."""

    rank: int


@dataclass(frozen=True)
class Tell:
    """Show the user a line."""

    line: str


@dataclass(frozen=True)
class Log:
    """Append to ``events.jsonl``."""

    entry: Mapping[str, Any]


@dataclass(frozen=True)
class ShowStatus:
    """Let the terminal's last line be this."""

    text: str


@dataclass(frozen=True)
class EndProcesses:
    """End the launcher's processes at once: there is no agent that could end anything."""


@dataclass(frozen=True)
class Finish:
    """All ranks have ended, or no more will be heard of them: clean up, and take the outcome."""


Action = Send | Write | HideStderr | Tell | Log | ShowStatus | EndProcesses | Finish
