"""When a checkpoint is due, and how all ranks come to know it at the same step."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

PERIOD = 0.25
"""Seconds from one agreement of the ranks to the next, at least."""


class Wishes(NamedTuple):
    """What a rank wants, or what all together want: the largest of each.

    ``stop``: the number of a signal that asks the job to save and end; 0: none.  ``from_end``: the rank that
    got it, counted from the last, which is 1; of several, this is the first rank.  ``save``: 1 where it
    is time to save.  ``steps``: calls from the start of this agreement to that of the next, which rank 0
    decides.
    """

    stop: int = 0
    from_end: int = 0
    save: int = 0
    steps: int = 0


class Agreement:
    """All ranks learn what any rank wants, at the same call of ``turn``, and hardly wait for it.

    Every ``PERIOD`` seconds an all_reduce of three numbers is started in one call, and looked at in the next.
    ``group`` is a group of these all_reduces only; None where there is one rank.
    """

    def __init__(self, group: Any, rank: int, ranks: int) -> None:
        self._group, self._rank, self._from_end = group, rank, ranks - rank
        self._wishes = torch.zeros(len(Wishes._fields), dtype=torch.int64)
        self._work: Any = None
        self._calls, self._next = 0, 1
        self._started = time.monotonic()
        self._calls_then = 0

    def turn(self, stop: int, save: bool) -> Wishes:
        """Say what this rank wants; returns what is agreed on.  Every rank calls it at the same steps."""
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
        """Wait for what is under way."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _steps_per_period(self) -> int:
        now = time.monotonic()
        calls, seconds = self._calls - self._calls_then, now - self._started
        self._started, self._calls_then = now, self._calls
        return max(1, int(PERIOD * calls / seconds)) if seconds > 0 else 1
