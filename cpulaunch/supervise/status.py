"""The terminal's last line while a job runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cpulaunch.supervise.rank import Rank, RankState

MAX_HOSTS = 3
"""Hosts that are named of those that miss ranks."""


def status_line(ranks: Sequence[Rank], seconds: float, since_output: float | None) -> str:
    """Which ranks are up, for how many ``seconds``, and when anything was last printed."""
    up = Counter(rank.host for rank in ranks if rank.state is RankState.RUNNING)
    sizes = Counter(rank.host for rank in ranks)
    parts = [f"{sum(up.values())} of {len(ranks)} ranks up"]
    fewer = [f"{host} {up[host]}/{size}" for host, size in sizes.items() if up[host] < size]
    if len(sizes) > 1 and fewer:
        parts.append(", ".join(fewer[:MAX_HOSTS]) + (" …" if len(fewer) > MAX_HOSTS else ""))
    parts.append(_duration(seconds))
    if since_output is not None:
        parts.append(f"last output {_duration(since_output)} ago")
    return "cpulaunch: " + " · ".join(parts)


def _duration(seconds: float) -> str:
    """``"1:02:03"``, ``"4:05"``, ``"6 s"``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
