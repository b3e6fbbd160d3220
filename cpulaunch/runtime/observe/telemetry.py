"""What each optimizer step of this rank took, written into the rank's ledger, where the agent reads it.

No thread, no system call.  Steps are counted for one optimizer: the first that steps, until it is gone or
others have made ``OTHERS`` steps in a row without it.
"""

from __future__ import annotations

import functools
import math
import os
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cpulaunch import ledger
from cpulaunch.telemetry import OF_STEPS

if TYPE_CHECKING:
    from cpulaunch.runtime.observe.communication import Communication
    from cpulaunch.runtime.observe.flops import Flops

OTHERS = 20
"""Steps of other optimizers, in a row, after which one of them is counted instead."""

DEPTH = 3
"""Levels of nested lists that are searched for a batch's first tensor."""

NAN = math.nan

_UNKNOWN = {field.name: NAN for field in OF_STEPS if not field.is_sum}

_GROUP, _COUNT, _FIRST = ledger.GROUP_BYTES // 8, 9, ledger.GROUP.size // 8
_OPERATION, _ENQUEUED, _COMPLETED = ledger.OPERATION.size // 8, 8, 10
"""Positions of a group's and an operation's fields in the ledger, in units of 8 bytes."""

recorder: Recorder | None = None
"""Writes this rank's steps, if anything reads them."""


def log(*, loss: Any) -> None:
    """Add the loss of the current step to the job's telemetry: a number, or a tensor with one element.

    The current step is the one that has just ended; if a batch was taken from a ``DataLoader`` since then, it
    is the next one.  Does nothing outside of a cpulaunch job.
    """
    if recorder is not None:
        detach = getattr(loss, "detach", None)  # torch warns if a tensor with a gradient is converted
        recorder.log(float(detach() if detach else loss))


def record(memory: Any) -> Recorder:
    """Record the steps of this process from now on."""
    global recorder
    recorder = Recorder(memory)
    return recorder


def watch_loaders(torch: Any, recorder: Recorder) -> None:
    """Have iterators of ``torch.utils.data.DataLoader`` report their batches."""
    kind = torch.utils.data.dataloader._BaseDataLoaderIter
    original = kind.__next__
    now = time.monotonic_ns
    tensor = torch.Tensor

    @functools.wraps(original)
    def next_batch(self: Any) -> Any:
        began = now()
        if getattr(self, "_num_yielded", None) == 0:
            recorder.begins(began, id(self))
        batch = original(self)
        ended = now()
        try:
            found = sizes(batch, tensor)
        except Exception:  # a user's mapping need not behave like one
            found = 0, 0
        recorder.took(id(self), ended - began, *found)
        return batch

    kind.__next__ = next_batch


def sizes(batch: Any, tensor: type, depth: int = DEPTH) -> tuple[int, int]:
    """Return samples (first dimension of the first tensor) and tokens (elements of ``input_ids``)."""
    if isinstance(batch, tensor):
        return (batch.shape[0] if batch.ndim else 1), 0  # type: ignore[attr-defined]
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        tokens = ids.numel() if isinstance(ids, tensor) else 0  # type: ignore[attr-defined]
        values: Any = batch.values()
    elif isinstance(batch, (list, tuple)):
        tokens, values = 0, batch
    else:
        return 0, 0
    for value in values if depth else ():
        samples, inner = sizes(value, tensor, depth - 1)
        if samples:
            return samples, tokens or inner
    return 0, tokens


class Recorder:
    """Writes the steps of one optimizer into a ledger; ``flops`` counts FLOPs of some of them."""

    def __init__(self, memory: Any, flops: Flops | None = None) -> None:
        self._memory = memory
        self._traffic = memoryview(memory)[ledger.TRAFFIC_AT : ledger.RECORDED_AT].cast("Q")
        self._waiting = memoryview(memory)[ledger.PROGRESS.size - 8 : ledger.PROGRESS.size].cast("Q")
        self._last = memoryview(memory)[ledger.RECORDED_AT : ledger.RECORDED_AT + 8].cast("Q")
        self._groups = memoryview(memory)[ledger.FIRST_GROUP : ledger.FIRST_STEP].cast("Q")
        self._ended_at = self._waited = 0  # at the last step: its end, and the time waited until then
        self.communication: Communication | None = None  # in groups of backends other than ccl
        self._others_busy = self._others_bytes = 0  # sums of that communication
        self.flops = flops
        self._number = 0  # of the last step
        self._counted: weakref.ref[Any] | None = None  # the optimizer
        self._others = 0  # steps of other optimizers since its last one
        self._base = 0  # start of the first step, moved forward by time that belongs to no step
        # The next record's fields: sums since the program's start, and other facts about its step.
        self.fields: dict[str, float] = {field.name: 0 if field.is_sum else NAN for field in OF_STEPS}
        self._batches: dict[int, list[int]] = {}  # iterator → samples and tokens since the last step
        self._latest = 0  # the iterator asked last
        self.begins(time.monotonic_ns())
        os.register_at_fork(after_in_child=self._forget)

    def begins(self, now: int, iterator: int = 0) -> None:
        """Start the first step at ``now``, unless a step has ended already; discard what came before.

        Also resets ``iterator``: a former iterator with the same number is gone, with its batches.
        """
        self._batches.pop(iterator, None)
        if not self._number:
            self._base, self.fields["input"], self._batches = now, 0, {}
            self._write(now)

    def took(self, iterator: int, nanoseconds: int, samples: int, tokens: int) -> None:
        """Count a batch that an iterator has handed out."""
        self.fields["input"] += nanoseconds
        self._latest = iterator
        if (sums := self._batches.get(iterator)) is None:
            self._batches[iterator] = [samples, tokens]
        else:
            sums[0] += samples
            sums[1] += tokens

    def log(self, loss: float) -> None:
        """Record ``loss`` for the last ended step, or for the next step if a batch was taken since."""
        if self._number and not self._batches:
            at = ledger.FIRST_STEP + self._number % ledger.STEPS * ledger.STEP.size
            ledger.LOSS.pack_into(self._memory, at + ledger.LOSS_AT, loss)
        else:
            self.fields["loss"] = loss

    def stepped(self, optimizer: Any) -> None:
        """Record an optimizer step."""
        if self._counted is None or self._counted() is not optimizer:
            self._others += 1
            if self._counted is not None and self._counted() is not None and self._others < OTHERS:
                return
            self._counted = weakref.ref(optimizer)
        self._others = 0
        now = time.monotonic_ns()
        self._number += 1
        self._count_waiting()
        if self._batches:
            # With several loaders, count the latest: the others were for evaluation, or for other inputs.
            samples, tokens = self._batches.get(self._latest, (0, 0))
            self.fields["samples"] += samples
            self.fields["tokens"] += tokens
            self._batches.clear()
        if self.flops and (counted := self.flops.stepped(self._number)) is not None:
            self.fields["flops"] = counted
        self._write(now)
        self.fields |= _UNKNOWN
        if self.flops and self.flops.precision and not self.flops.peak:
            self.flops.measure_peak()
            peak = self.flops.peak, self.flops.precision.encode()
            ledger.PEAK.pack_into(self._memory, ledger.RECORDED_AT + 8, *peak)
            self._base += time.monotonic_ns() - now

    def _count_waiting(self) -> None:
        """Add DDP's wait for the future of its last bucket, which ccl doesn't see: from its call to its end.

        Nothing is left to compute during that wait.  Waiting that ccl has seen may be of the same operation,
        so it is subtracted.  ccl's groups come first in the ledger; if there are none, other backends' times
        are used.
        """
        groups, called, ended = self._groups, 0, 0
        if self.communication and groups[0] & 0xFFFFFFFF == ledger.FREE:
            self.communication.stepped()
            self._waiting[0] = self.communication.waiting
            self._others_busy, self._others_bytes = self.communication.busy, self.communication.bytes
            return
        for at in range(0, len(groups), _GROUP):
            state = groups[at] & 0xFFFFFFFF
            if state == ledger.FREE:
                break
            if state == ledger.OPEN and (count := groups[at + _COUNT]):
                record = at + _FIRST + (count - 1) % ledger.OPERATIONS * _OPERATION
                if groups[record + _ENQUEUED] > called:
                    called, ended = groups[record + _ENQUEUED], groups[record + _COMPLETED]
        if self._ended_at < called < ended:
            seen = self._waiting[0] - self._waited
            self._waiting[0] += max(0, ended - called - seen)

    def _write(self, now: int) -> None:
        number, fields = self._number, self.fields
        under_way, since, busy, size = self._traffic
        if under_way and now > since:
            busy += now - since
        fields["seconds"] = now - self._base
        fields["communication"] = busy + self._others_busy
        fields["waiting"] = self._waiting[0]
        fields["bytes"] = size + self._others_bytes
        at = ledger.FIRST_STEP + number % ledger.STEPS * ledger.STEP.size
        ledger.STEP.pack_into(self._memory, at, number, now, *fields.values())
        self._last[0] = number
        self._ended_at, self._waited = now, self._waiting[0]

    def _forget(self) -> None:
        """Detach from the ledger: a forked process is not the rank, and its writes are dropped."""
        self._memory = nowhere = bytearray(ledger.SIZE)
        self._last = self._waiting = memoryview(nowhere)[:8].cast("Q")
        if self.flops:
            self.flops.leave()
