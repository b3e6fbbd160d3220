"""A stalled job of two ranks, and its observers, with a fake clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from cpulaunch.ledger import MEETING, STARTED
from cpulaunch.messages import AskDump, AskProgress, Beat, Dump, Exit, LauncherMessage
from cpulaunch.supervise.job.events import Action, ReportStall, Send, Tell
from cpulaunch.supervise.job.rank import Rank, RankState
from cpulaunch.supervise.stalls.detection import Stalls
from cpulaunch.supervise.stalls.inquiry import Inquiry
from cpulaunch.supervise.stalls.progress import StallSettings

A = TypeVar("A", bound=Action)
AUTO = StallSettings()
BEAT = 10.0
"""Seconds from an agent's last message to its next beat."""


class Job:
    """Two ranks whose agents send beats and answers by default; the ranks' state is in ``beats``.

    Answers arrive ``slow`` seconds after their request.
    """

    def __init__(self, settings: StallSettings = AUTO, steps: int = 0, ahead: float = 0.0) -> None:
        self.ranks = [Rank(0, "node0", RankState.RUNNING), Rank(1, "node1", RankState.RUNNING, clock=-ahead)]
        self.now, self.ahead = 0.0, ahead
        self.inquiry = Inquiry()
        self.stalls = Stalls(self.ranks, settings, 0.0, self.inquiry)
        self.beats = [Beat(expects_steps=True) for _ in self.ranks]
        self.answering, self.dumping = {0, 1}, {0, 1}
        self.slow = 0.0
        self.called: dict[int, list[str]] = {}  # the operations of group 0 in which ranks wait
        self.lines = [1, 1]  # the line of train.py at which ranks are
        self.works_until = 1.0  # until this time, the worker uses the CPU
        self.worker = 0
        self.states = ["S", "S"]  # the states of the ranks' processes
        self.throttled = 0.0  # the share of time for which a quota stops each process
        self.done: list[tuple[float, Action]] = []
        self._on_the_way: list[tuple[float, Rank, LauncherMessage]] = []
        self._beat_at = [BEAT, BEAT]
        if steps:
            self.steps(steps)

    def steps(self, count: int, *ranks: int, gap: float = 0.1) -> None:
        """Ranks make ``count`` further steps now."""
        for rank in ranks or (0, 1):
            before, at = self.beats[rank], self.now + self.ahead * rank
            self.beats[rank] = before._replace(
                steps=before.steps + count, progressed_at=at, longest_gap=max(before.longest_gap, gap)
            )

    def waits(self, rank: int) -> None:
        """The rank calls ``init_process_group`` now."""
        self.beats[rank] = self.beats[rank]._replace(waits_since=self.now + self.ahead * rank)

    def until(self, moment: float) -> None:
        while self.now < moment:
            due = [at for at, *_ in self._on_the_way]
            self.now = max(self.now, min(moment, self.now + 0.25, self.stalls.wake_at or moment, *due))
            come = [each for each in self._on_the_way if each[0] <= self.now]
            self._on_the_way = [each for each in self._on_the_way if each not in come]
            for _, rank, message in come:
                self._answer(rank, message)
            for rank in self.ranks:
                if self.now >= self._beat_at[rank.rank]:
                    self._beat(rank)
            self._act(self.stalls.look(self.now))

    def prints(self) -> None:
        self._act(self.stalls.add_progress(self.ranks[0], self.now))

    def ends(self, number: int) -> None:
        """The program exits with code 0."""
        rank = self.ranks[number]
        rank.state, rank.exit = RankState.EXITED, Exit(0, None, self.now, False, 0, None)
        self._act(self.stalls.handle_end(rank, self.now))

    def _act(self, actions: Sequence[Action]) -> None:
        self.done += [(self.now, action) for action in actions]
        for action in actions:
            if isinstance(action, Send) and self.slow:
                rank = self.ranks[action.rank]
                self._on_the_way.append((self.now + self.slow, rank, action.message))
            elif isinstance(action, Send):
                self._answer(self.ranks[action.rank], action.message)

    def _beat(self, rank: Rank) -> None:
        self._beat_at[rank.rank] = self.now + BEAT
        self._act(self.stalls.beat(rank, self.beats[rank.rank], self.now))

    def _answer(self, rank: Rank, message: LauncherMessage) -> None:
        if isinstance(message, AskProgress) and rank.rank in self.answering:
            self._beat(rank)
        elif isinstance(message, AskDump) and rank.rank in self.dumping:
            since = self.beats[rank.rank].waits_since
            operation = {
                "sequence": 0, "state": STARTED, "kind": MEETING, "type": "", "bytes": 0, "enqueued": since,
                "started": since, "completed": None, "peer": -1, "waits_for": "",
            }  # fmt: skip
            group = {"name": "", "backend": "", "size": 2, "rank": rank.rank, "count": 1}
            groups = [{**group, "operations": [operation]}] if since is not None else []
            if (called := self.called.get(rank.rank)) is not None:
                operations = [{**operation, "kind": kind} for kind in called]
                groups = [{**group, "name": "0", "backend": "gloo", "operations": operations}]
            cpu = min(self.now, self.works_until) if rank.rank == self.worker else 1.0
            frames = [["load", "/home/me/train.py", self.lines[rank.rank]]]
            main = {
                "id": 1,
                "name": "MainThread",
                "gil": False,
                "idle": True,
                "frames": frames,
                "left_out": 0,
            }
            program = {
                "pid": 1000 + rank.rank,
                "cpu": cpu,
                "state": self.states[rank.rank],
                "word": "sleeping",
                "throttled": {"share": self.throttled},
                "threads": [main],
            }
            dump = Dump(message.request, self.now, groups, [program], "")
            self._beat_at[rank.rank] = self.now + BEAT
            self.inquiry.store_answer(rank.rank, dump, self.now)
            self._act(self.stalls.handle_answer(rank, self.now))

    def sent(self, kind: type[LauncherMessage]) -> list[float]:
        return [
            at for at, action in self.done if isinstance(action, Send) and isinstance(action.message, kind)
        ]

    def of(self, kind: type[A]) -> list[A]:
        return [action for _, action in self.done if isinstance(action, kind)]

    @property
    def reports(self) -> list[float]:
        return [at for at, action in self.done if isinstance(action, ReportStall)]

    @property
    def told(self) -> list[str]:
        return [action.line for _, action in self.done if isinstance(action, Tell)]
