"""The launcher's state of one attempt.  Pure.

`JobState` adds the handling of events.  The modules ``agents``, ``launch`` and ``ending`` change the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from signal import SIGKILL
from typing import TYPE_CHECKING, Any, NamedTuple

from cpulaunch import messages
from cpulaunch.messages import BEATS_PER_TIMEOUT
from cpulaunch.model.names import RANKS, Names
from cpulaunch.supervise.job.events import Action, Log, Send, Tell
from cpulaunch.supervise.job.notices import Failures, Notes
from cpulaunch.supervise.job.presence import Arrivals, Clocks, Heartbeats
from cpulaunch.supervise.job.processes import Processes
from cpulaunch.supervise.job.rank import Rank, RankState
from cpulaunch.supervise.job.status import Up
from cpulaunch.supervise.stalls.detection import Stalls
from cpulaunch.supervise.stalls.inquiry import Inquiry
from cpulaunch.supervise.stalls.instances import InstanceStalls
from cpulaunch.supervise.stalls.mismatch import Calls
from cpulaunch.supervise.stalls.progress import StallSettings
from cpulaunch.supervise.stalls.rounds import Rounds
from cpulaunch.supervise.telemetry.metrics import Metrics
from cpulaunch.supervise.telemetry.rows import Telemetry

if TYPE_CHECKING:
    from cpulaunch.launchers.base import Launcher


class Watching(NamedTuple):
    """The constants of an attempt.

    ``hosts`` has the host of each rank, in the order of ranks.  ``processes`` is the number of the launcher's
    processes, and ``command`` their name in messages.  Periods are in seconds.  ``here_alone``: all ranks are
    on the launcher's host; missing heartbeats are ignored, because the kernel reports the end of an agent.
    ``restarts`` is the number of earlier restarts.  ``names`` are the words for ranks.  ``independent``: the
    ranks don't need each other.  ``go_on``: if one rank fails, the others go on.
    """

    hosts: Sequence[str]
    launcher: Launcher
    processes: int
    command: str
    heartbeat_timeout: float
    grace_period: float
    here_alone: bool = False
    stalls: StallSettings = StallSettings()
    restarts: int = 0
    names: Names = RANKS
    independent: bool = False
    go_on: bool = False


class State:
    """The state of one attempt.

    ``now`` is the time of the current event, and ``actions`` are the actions for it so far.  Times in logs
    and outcomes count from ``began``, the start of the job's first attempt.
    """

    def __init__(self, watching: Watching, now: float, began: float) -> None:
        self.watching = watching
        self.ranks = [Rank(number, host) for number, host in enumerate(watching.hosts)]
        self.running = len(self.ranks)  # ranks whose state isn't final
        self.now = self.started = self.last_tick = now
        self.began = began
        self.actions: list[Action] = []

        self.up = Up(watching.hosts, watching.names.noun)
        self.arrivals, self.clocks, self.heartbeats = Arrivals(self.ranks), Clocks(), Heartbeats()
        self.processes = Processes(watching.processes, watching.launcher)
        kind = InstanceStalls if watching.independent else Stalls
        self.inquiry = Inquiry()
        self.stalls = kind(self.ranks, watching.stalls, now, self.inquiry, watching.names)
        self.rounds = Rounds(self.inquiry)
        self.calls: Calls | None = None  # requested after an error that other ranks may have caused
        self.notes = Notes(watching.names)
        self.failures = Failures(self.ranks, watching.names)
        self.output_at: float | None = None
        self.telemetry = Telemetry(len(self.ranks), began, watching.names)
        self.metrics = Metrics()
        self.steps = 0  # the largest number of optimizer steps of any rank
        self.unknown: set[str] = set()  # unknown kinds of messages, each reported once

        self.user_signals = 0
        self.interrupted: int | None = None  # the signal that ended the job
        self.end: messages.End | None = None  # the message that was sent to end the ranks
        self.end_at: float | None = None  # when the message was first sent
        self.spared: tuple[int, float] | None = None  # the rank that gets the message later, and when
        self.give_up_at: float | None = None
        self.finished = False

    @property
    def ending(self) -> bool:
        """Whether the ranks are being ended."""
        return self.end is not None

    @property
    def grace_is_over(self) -> bool:
        """Whether the ranks were asked to end, and their time for that is over."""
        grace = self.watching.grace_period
        if self.end is None or self.end_at is None or self.end.signal == SIGKILL:
            return False
        return self.now >= self.end_at + grace

    @property
    def may_be_missing(self) -> bool:
        """Whether a rank that hasn't connected may be reported as missing."""
        return not (self.ending or self.calls or self.processes.unreached)

    @property
    def ranks_end_by_themselves(self) -> bool:
        """Whether ranks outlive the launcher's process, and some are still in their grace period."""
        if not self.watching.launcher.ranks_outlive_it or self.give_up_at is None:
            return False
        return any(rank.state is RankState.RUNNING for rank in self.ranks)

    @property
    def missed_beat(self) -> float:
        """Seconds of silence after which a rank has missed a beat: 1.5 times the time between two beats."""
        return 1.5 * self.watching.heartbeat_timeout / BEATS_PER_TIMEOUT

    @property
    def longest_silence(self) -> float:
        """Seconds without a message after which a rank is lost.

        This is the timeout plus one period, as the network may fail just before a beat.  So the job survives
        every outage that is shorter than ``heartbeat_timeout``.
        """
        return self.watching.heartbeat_timeout * (1 + 1 / BEATS_PER_TIMEOUT)

    def silent(self, seconds: float) -> list[Rank]:
        """Return the running ranks that have sent no message for ``seconds``."""
        if self.watching.here_alone:
            return []
        return self.heartbeats.silent(seconds, self.now)

    def move(self, rank: Rank, state: RankState) -> None:
        if rank.state.final and not state.final:
            return  # a late message doesn't change a final state
        if state.final and not rank.state.final:
            self.running -= 1
            self.inquiry.remove_rank(rank.rank)
            self.heartbeats.expect_no_more(rank)
            rank.over_at = self.now
        self.up.moves(rank.host, rank.state is RankState.RUNNING, state is RankState.RUNNING)
        rank.state = state

    def send(self, rank: Rank, message: messages.LauncherMessage) -> None:
        self.actions.append(Send(rank.rank, message))

    def tell(self, line: str) -> None:
        self.actions.append(Tell(line))

    def log(self, rank: int | None, kind: str, fields: Mapping[str, Any]) -> None:
        seconds = round(self.now - self.began, 3)
        self.actions.append(Log({"seconds": seconds, "rank": rank, "type": kind, **fields}))
