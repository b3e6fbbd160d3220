"""When a checkpoint is due, and how all ranks learn that at the same step."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

PERIOD = 0.25
"""Minimum seconds between two agreements of the ranks."""


class Wishes(NamedTuple):
    """One rank's wishes, or the maximum of each field over all ranks.

    ``stop``: the number of a signal that asks the job to save and end; 0 means none.  ``from_end``: the rank
    that got the signal, counted from the last rank, which is 1; so the maximum is the first rank with a
    signal.  ``save``: 1 if it is time to save.  ``steps``: calls from the start of this agreement to the next
    one's, as rank 0 decides.
    """

    stop: int = 0
    from_end: int = 0
    save: int = 0
    steps: int = 0


class Agreement:
    """Shares the wishes of any rank with all ranks, at the same call of ``turn``, with hardly any waiting.

    Every ``PERIOD`` seconds, one call starts an all_reduce of ``Wishes``, and the next call reads it.
    ``group`` serves these all_reduces only; None if there is one rank.
    """

    def __init__(self, group: Any, rank: int, ranks: int) -> None:
        self._group, self._rank, self._from_end = group, rank, ranks - rank
        self._wishes = torch.zeros(len(Wishes._fields), dtype=torch.int64)
        self._work: Any = None
        self._calls, self._next = 0, 1
        self._started = time.monotonic()
        self._calls_then = 0

    def turn(self, stop: int, save: bool) -> Wishes:
        """Pass this rank's wishes, and return the agreed ones.  Every rank calls this at the same steps."""
        self._calls += 1
        if self._group is None:
            return Wishes(stop, self._from_end, int(save))
        agreed = Wishes()
        if self._work is not None:
            self._work.wait()
            self._work = None
            agreed = Wishes(*map(int, self._wishes.tolist()))
            self._next = max(self._calls, self._calls - 1 + agreed.steps)
        if self._calls >= self._next and not agreed.stop:
            steps = self._steps_per_period() if self._rank == 0 else 0
            self._wishes.copy_(torch.tensor(Wishes(stop, self._from_end if stop else 0, int(save), steps)))
            self._work = dist.all_reduce(self._wishes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def finish(self) -> None:
        """Wait for the all_reduce under way."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _steps_per_period(self) -> int:
        now = time.monotonic()
        calls, seconds = self._calls - self._calls_then, now - self._started
        self._started, self._calls_then = now, self._calls
        return max(1, int(PERIOD * calls / seconds)) if seconds > 0 else 1
