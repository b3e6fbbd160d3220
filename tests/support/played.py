"""Feeds events of a job to the state machine, with a fake clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

from cpulaunch import launchers, messages
from cpulaunch.model.names import INSTANCE, Names
from cpulaunch.supervise.job.events import (
    Action,
    AgentConnected,
    AgentDisconnected,
    AgentSent,
    Event,
    Finish,
    ProcessEnded,
    ProcessPrinted,
    Send,
    Tell,
    Tick,
    UserSignal,
)
from cpulaunch.supervise.job.job import JobState
from cpulaunch.supervise.job.outcome import Failure, Outcome
from cpulaunch.supervise.job.state import Watching
from cpulaunch.supervise.stalls.progress import StallSettings

TIMEOUT, GRACE = 6.0, 1.0
SILENCE = 8.0  # a host may be silent for TIMEOUT and the time between two beats
START = 1000.0
"""The launcher's clock at the start of the job."""

GLOO = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:14554."
"""gloo's error in a rank whose peer has ended."""

SSH = "ssh: connect to host node2 port 22: Connection timed out\r\n"

A = TypeVar("A", bound=Action)


class Played:
    """A job of one rank on each of ``hosts``.  Times are in seconds since its start.

    Hosts' clocks are ahead of the launcher's by ``ahead`` seconds, a number for each rank.  As time passes,
    agents send beats and the loop ticks, by default.
    """

    def __init__(
        self,
        hosts: Sequence[str] = ("node0", "node1", "node2", "node3"),
        launcher: str = "intel",
        ahead: Sequence[float] = (),
        here_alone: bool = False,
        stalls: StallSettings | None = None,
        independent: bool = False,
        go_on: bool = True,
    ) -> None:
        loaded = launchers.load(launcher)
        processes = len(hosts) if loaded.agents_are_children else 1
        self.watching = Watching(
            hosts, loaded, processes, "mpiexec", TIMEOUT, GRACE, here_alone, stalls or StallSettings()
        )
        if independent:
            self.watching = self.watching._replace(names=Names(INSTANCE), independent=True, go_on=go_on)
        self.state = JobState(self.watching, START)
        self.now = 0.0
        self.actions: list[tuple[float, Action]] = []
        self.ahead = dict(enumerate(ahead))
        self.beating: set[int] = set()

    # ---- events

    def happens(self, event: Event) -> list[Action]:
        done = self.state.handle(event, START + self.now)
        self.actions += [(self.now, action) for action in done]
        return done

    def until(self, moment: float, *, full: bool = False) -> None:
        """Let time pass, in steps like the launcher's loop.  Running agents send beats."""
        while self.now < moment and not self.state.finished:
            due = [moment, self.now + self.state.tick_period]
            if self.state.wake_at is not None:
                due.append(max(self.now, self.state.wake_at - START))
            self.now = min(due)
            if not full:
                for rank in sorted(self.beating):
                    self.says(rank, messages.Beat())
            self.happens(Tick(full))

    def to_the_end(self) -> None:
        """Let time pass until the job has finished, for at most a minute."""
        end = self.now + 60
        while not self.state.finished:
            assert self.now < end, "the job doesn't end"
            self.until(self.now + 1)

    def connects(
        self, *ranks: int, version: int = messages.VERSION, said: float = 0.0, here: bool = False
    ) -> None:
        """The agents' hellos arrive; they were sent ``said`` seconds ago."""
        for rank in ranks:
            self.beating.add(rank)
            hello = messages.Hello(version, rank, "", "", self.clock(rank) - said, 99, "x")
            self.happens(AgentConnected(rank, hello, here))

    def answers(self, rank: int, after: float) -> None:
        """The agent answers the request for its clock after ``after`` seconds, half of which pass before the
        answer."""
        self.now += after / 2
        at = self.clock(rank)
        self.now += after / 2
        self.says(rank, messages.Time(at))

    def starts(self, *ranks: int) -> None:
        """The agents of ``ranks`` connect, and start their programs."""
        self.connects(*ranks)
        for rank in ranks:
            self.says(rank, messages.Started(100 + rank, str(rank), "", 1, []))

    def says(self, rank: int, message: messages.AgentMessage | messages.Unknown) -> list[Action]:
        return self.happens(AgentSent(rank, message))

    def raises(self, rank: int, error: str, **different: Any) -> None:
        """The program raises ``error`` now."""
        raised = messages.Failure(
            error, "train.py", 5, f"Traceback …\n{error}", "", None, self.clock(rank), False, []
        )
        self.says(rank, raised._replace(**different))

    def exits(self, rank: int, code: int | None = 0, signal: int | None = None, **different: Any) -> None:
        """The program ends now, and its agent when it is released."""
        end = messages.Exit(code, signal, self.clock(rank), False, 0, None)._replace(**different)
        released = any(
            isinstance(action, Send) and isinstance(action.message, messages.Release)
            for action in self.says(rank, end)
        )
        assert released
        self.disconnects(rank)

    def obeys(self, *ranks: int) -> None:
        """The programs of ``ranks`` end by SIGTERM, which the launcher has requested."""
        for rank in ranks:
            assert self.sent(rank, messages.End), f"rank {rank} wasn't asked to end"
            self.exits(rank, None, 15, by_launcher=True)

    def disconnects(self, rank: int, error: str = "") -> None:
        self.beating.discard(rank)
        self.happens(AgentDisconnected(rank, error))

    def falls_silent(self, *ranks: int) -> None:
        self.beating -= set(ranks)

    def process_says(self, text: str) -> None:
        self.happens(ProcessPrinted(text.encode()))

    def process_ends(self, code: int, number: int = 0) -> None:
        self.happens(ProcessEnded(number, code))

    def user_sends(self, number: int) -> None:
        self.happens(UserSignal(number))

    # ---- results

    def clock(self, rank: int) -> float:
        """The current time of the clock on a rank's host."""
        return 2e9 + self.now + self.ahead.get(rank, 0.0)

    def sent(self, rank: int, kind: type[messages.LauncherMessage]) -> list[tuple[float, Any]]:
        """The times and messages of this kind sent to a rank's agent."""
        return [
            (at, action.message)
            for at, action in self.actions
            if isinstance(action, Send) and action.rank == rank and isinstance(action.message, kind)
        ]

    def of(self, kind: type[A]) -> list[tuple[float, A]]:
        """The actions of one kind, with their times."""
        return [(at, action) for at, action in self.actions if isinstance(action, kind)]

    @property
    def told(self) -> list[str]:
        return [action.line for _, action in self.of(Tell)]

    def statuses(self) -> list[str]:
        return [rank.status for rank in self.state.ranks]

    def outcome(self) -> Outcome:
        """The end of the job, which is reported once."""
        assert len(self.of(Finish)) == 1
        return self.state.outcome(START + self.now)

    def first_failure(self) -> Failure:
        first = self.outcome().first_failure
        assert first
        return first


def running(*hosts: str, **different: Any) -> Played:
    """A job whose ranks have all started."""
    job = Played(hosts, **different) if hosts else Played(**different)
    for rank in itertools.islice(itertools.count(), len(job.watching.hosts)):
        job.starts(rank)
    job.until(2.0)
    return job
