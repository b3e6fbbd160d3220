"""Lets all ranks agree on the step at which to save."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

PERIOD = 0.25
"""Minimum seconds between two agreements."""


class Request(NamedTuple):
    """One rank's request, or the maximum of each field over all ranks.

    ``stop``: the number of a signal that asks the job to save and end, or 0.  ``from_end``: the rank that got
    the signal, counted from 1 for the last rank, so that the maximum is the first such rank.  ``save``: 1 if
    a checkpoint is due.  ``steps``: the number of calls until the next agreement starts; rank 0 sets it.
    """

    stop: int = 0
    from_end: int = 0
    save: int = 0
    steps: int = 0


class Agreement:
    """Shares a request of any rank with all ranks, which get it at the same call of ``agree``.

    About every ``PERIOD`` seconds, a call starts an all_reduce of ``Request``, and the next call returns the
    result.  ``group`` must be used for nothing else; None if there is one rank.
    """

    def __init__(self, group: Any, rank: int, ranks: int) -> None:
        self._group, self._rank, self._from_end = group, rank, ranks - rank
        self._request = torch.zeros(len(Request._fields), dtype=torch.int64)
        self._work: Any = None
        self._calls, self._next = 0, 1
        self._started = time.monotonic()
        self._calls_then = 0

    def agree(self, stop: int, save: bool) -> Request:
        """Pass this rank's request; return all ranks' request.  Every rank must call this at each step."""
        self._calls += 1
        if self._group is None:
            return Request(stop, self._from_end, int(save))
        agreed = Request()
        if self._work is not None:
            self.finish()
            agreed = Request(*map(int, self._request.tolist()))
            self._next = max(self._calls, self._calls - 1 + agreed.steps)
        if self._calls >= self._next and not agreed.stop:
            steps = self._steps_per_period() if self._rank == 0 else 0
            self._request.copy_(torch.tensor(Request(stop, self._from_end if stop else 0, int(save), steps)))
            self._work = dist.all_reduce(self._request, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def finish(self) -> None:
        """Wait for the all_reduce under way, if there is one."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _steps_per_period(self) -> int:
        now = time.monotonic()
        calls, seconds = self._calls - self._calls_then, now - self._started
        self._started, self._calls_then = now, self._calls
        return max(1, int(PERIOD * calls / seconds)) if seconds > 0 else 1
