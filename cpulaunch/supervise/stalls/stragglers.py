"""Find hosts that compute more slowly than the others, from the ranks' computing time per step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from cpulaunch.messages import Beat

STEPS = 50
"""Minimum number of steps in a window."""

SLOWER = 1.5
"""A host is slow if its computing time is more than this factor times the others' median."""

MATTERS = 0.1
"""A host is slow only if the difference is more than this part of a step."""

WINDOWS = 2
"""A host is reported once it was slow in this number of successive windows."""


class Straggler(NamedTuple):
    """A slow host: it computes for ``seconds`` per step, the others for ``others``, over ``steps`` steps."""

    host: str
    rank: int
    seconds: float
    others: float
    steps: int

    def __str__(self) -> str:
        return (
            f"{self.host} is slower than the others: {self.seconds * 1e3:.0f} ms of computing per step, "
            f"the others {self.others * 1e3:.0f} ms, over {self.steps} steps"
        )


class _Window(NamedTuple):
    computing: float
    elapsed: float  # both in seconds per step
    steps: int


class Stragglers:
    """Finds slow hosts from the ranks' beats, and reports each once.  Windows begin and end with beats."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """``hosts`` has the host of each rank, in the order of ranks."""
        self._hosts = hosts
        self._began: dict[int, tuple[float, Beat]] = {}
        self._windows: dict[int, _Window] = {}
        self._slow: dict[str, list[int]] = {}  # slow host → steps of its last successive slow windows
        self._reported: set[str] = set()
        self._several = len(set(hosts)) > 1

    def beat(self, rank: int, beat: Beat, now: float) -> list[Straggler]:
        """Record a rank's beat, and return the hosts that it shows to be slow."""
        if not self._several or not beat.steps:
            return []
        began, first = self._began.setdefault(rank, (now, beat))
        steps = beat.steps - first.steps
        if steps < STEPS:
            return []
        elapsed, waiting = now - began, beat.waiting - first.waiting
        self._began[rank] = now, beat
        self._windows[rank] = _Window(max(0.0, elapsed - waiting) / steps, elapsed / steps, steps)
        if len(self._windows) < len(self._hosts):
            return []
        windows, self._windows = self._windows, {}
        return self._compare(windows)

    def forget(self) -> None:
        """Discard open windows, because the launcher was suspended."""
        self._began.clear()
        self._windows.clear()

    def _compare(self, windows: dict[int, _Window]) -> list[Straggler]:
        of_hosts: dict[str, list[_Window]] = {}
        for rank, window in windows.items():
            of_hosts.setdefault(self._hosts[rank], []).append(window)
        computing = {host: median(w.computing for w in theirs) for host, theirs in of_hosts.items()}
        found = []
        for host, seconds in computing.items():
            others = median(other for name, other in computing.items() if name != host)
            step = median(window.elapsed for window in of_hosts[host])
            if seconds <= SLOWER * others or seconds - others <= MATTERS * step:
                self._slow.pop(host, None)
                continue
            slow = self._slow.setdefault(host, [])
            slow.append(of_hosts[host][0].steps)
            if len(slow) >= WINDOWS and host not in self._reported:
                self._reported.add(host)
                rank = self._hosts.index(host)
                found.append(Straggler(host, rank, seconds, others, sum(slow)))
        return found
