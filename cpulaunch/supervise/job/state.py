"""What the launcher knows of one attempt, and has decided; pure.

All that changes while it runs stands here.  `JobState`, `Heard`, `Launched` and `Ending` work on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from cpulaunch.supervise.stalls.mismatch import Sides
from cpulaunch.supervise.stalls.progress import StallSettings
from cpulaunch.supervise.stalls.rounds import Rounds
from cpulaunch.supervise.telemetry.metrics import Metrics
from cpulaunch.supervise.telemetry.rows import Telemetry

if TYPE_CHECKING:
    from cpulaunch.launchers.base import Launcher


class Watching(NamedTuple):
    """What doesn't change while a job is watched.

    ``hosts`` are those of the ranks, in the order of ranks; ``processes`` how many the launcher has, and
    ``command`` what they are called.  Periods are in seconds.  ``here_alone``: all ranks are on the
    launcher's host, where the kernel tells of an agent's end, and silence only of much to do.
    ``restarts`` is how often the job was started again before.  ``names`` are what ranks are called.
    ``independent``: they need each other for nothing, and ``go_on``: where one of them fails, the others
    go on.
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
    """One attempt.  ``now`` is the time of the event that is looked at, ``actions`` what to do about it.

    ``began`` is when the job's first attempt did, which times are counted from.
    """

    def __init__(self, watching: Watching, now: float, began: float) -> None:
        self.watching = watching
        self.ranks = [Rank(number, host) for number, host in enumerate(watching.hosts)]
        self.running = len(self.ranks)  # ranks whose state isn't final
        self.now = self.started = self.looked_at = now
        self.began = began
        self.actions: list[Action] = []

        self.up = Up(watching.hosts, watching.names.noun)
        self.arrivals, self.clocks, self.heartbeats = Arrivals(self.ranks), Clocks(), Heartbeats()
        self.processes = Processes(watching.processes, watching.launcher)
        kind = InstanceStalls if watching.independent else Stalls
        self.inquiry = Inquiry()
        self.stalls = kind(self.ranks, watching.stalls, now, self.inquiry, watching.names)
        self.rounds = Rounds(self.inquiry)
        self.sides: Sides | None = None  # once ranks may call different operations, or have left
        self.notes = Notes(watching.names)
        self.failures = Failures(self.ranks, watching.names)
        self.output_at: float | None = None
        self.telemetry = Telemetry(len(self.ranks), began, watching.names)
        self.metrics = Metrics()
        self.steps = 0  # of optimizers, by the rank that has made most
        self.unknown: set[str] = set()  # kinds of messages

        self.user_signals = 0
        self.interrupted: int | None = None  # by which of them
        self.end: messages.End | None = None  # what ranks are sent, once they are to end
        self.end_at: float | None = None  # when they first were
        self.spared: tuple[int, float] | None = None  # a rank that isn't yet, and when its time is up
        self.give_up_at: float | None = None
        self.finished = False

    @property
    def ending(self) -> bool:
        """Whether the ranks are to end."""
        return self.end is not None

    @property
    def may_be_missing(self) -> bool:
        """Whether a rank that isn't heard is missed."""
        return not (self.ending or self.sides or self.processes.unreached)

    @property
    def ranks_end_by_themselves(self) -> bool:
        """Whether ranks have outlived the launcher's process, and have time to end, as they were told to."""
        if not self.watching.launcher.ranks_outlive_it or self.give_up_at is None:
            return False
        return any(rank.state is RankState.RUNNING for rank in self.ranks)

    @property
    def two_beats(self) -> float:
        return 1.5 * self.watching.heartbeat_timeout / BEATS_PER_TIMEOUT

    def silent(self, seconds: float) -> list[Rank]:
        """Ranks that should run, but haven't been heard for so long."""
        if self.watching.here_alone:
            return []
        return self.heartbeats.silent(seconds, self.now)

    def move(self, rank: Rank, state: RankState) -> None:
        if rank.state.final and not state.final:
            return  # a word that comes late changes nothing
        if state.final and not rank.state.final:
            self.running -= 1
            self.inquiry.gone(rank.rank)
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
