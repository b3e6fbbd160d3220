"""The terminal's last line while a job runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

MAX_HOSTS = 3
"""Maximum number of hosts with missing ranks that are named."""


class Up:
    """Counts the ranks that are up.

    ``hosts`` has the host of each rank, and ``noun`` is the word for a rank.
    """

    def __init__(self, hosts: Sequence[str], noun: str = "rank") -> None:
        self.count, self.size, self.noun = 0, len(hosts), noun
        self._sizes = Counter(hosts)
        self._fewer = dict.fromkeys(hosts, 0)  # hosts with missing ranks → ranks that are up there

    def moves(self, host: str, before: bool, after: bool) -> None:
        """Count a rank on ``host``: whether it was up ``before``, and whether it is up ``after``."""
        if before == after:
            return
        self.count += after - before
        size = self._sizes[host]
        up = self._fewer.get(host, size)
        self._fewer[host] = up + after - before
        if self._fewer[host] == size:
            del self._fewer[host]

    def fewer(self) -> str:
        """Name the first hosts with missing ranks, and their counts.  Empty if the job has one host only."""
        if len(self._sizes) == 1:
            return ""
        first = [f"{host} {up}/{self._sizes[host]}" for host, up in islice(self._fewer.items(), MAX_HOSTS)]
        return ", ".join(first) + (" …" if len(self._fewer) > MAX_HOSTS else "")


def status_line(up: Up, seconds: float, restarts: int, steps: str, since_output: float | None) -> str:
    """Format the status line.

    ``seconds`` is the job's time so far, ``steps`` the progress in words, and ``since_output`` the seconds
    since the last output of any rank, or None.
    """
    parts = [f"{up.count} of {up.size} {up.noun}s up"]
    if fewer := up.fewer():
        parts.append(fewer)
    parts.append(duration(seconds))
    if restarts:
        parts.append(f"restart {restarts}")
    if steps:
        parts.append(steps)
    if since_output is not None:
        parts.append(f"last output {duration(since_output)} ago")
    return "cpulaunch: " + " · ".join(parts)


def duration(seconds: float) -> str:
    """Format seconds as ``"1:02:03"``, ``"4:05"`` or ``"6 s"``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
