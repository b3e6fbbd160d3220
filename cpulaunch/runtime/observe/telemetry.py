"""What each optimizer step of this rank took, written into the rank's ledger: no thread, no system call.

The agent reads it there.  Steps are those of one optimizer: the first one that steps, until it is gone or
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
"""Steps of other optimizers after which one of them is counted in the place of the one that was."""

DEPTH = 3
"""Lists within lists that are looked into for a batch's first tensor."""

NAN = math.nan

_UNKNOWN = {field.name: NAN for field in OF_STEPS if not field.is_sum}

_GROUP, _COUNT, _FIRST = ledger.GROUP_BYTES // 8, 9, ledger.GROUP.size // 8
_OPERATION, _ENQUEUED, _COMPLETED = ledger.OPERATION.size // 8, 8, 10
"""Where a group's fields, and an operation's, are in the ledger, in units of 8 bytes."""

recorder: Recorder | None = None
"""Writes this rank's steps, if somebody reads them."""


def log(*, loss: Any) -> None:
    """Let the job's telemetry have the loss of the current step: a number, or a tensor with one element.

    That is the step that has just ended, or where a batch was taken from a ``DataLoader`` since, the one that
    comes.  Outside of a cpulaunch job it does nothing.
    """
    if recorder is not None:
        detach = getattr(loss, "detach", None)  # torch warns of a number made of what has a gradient
        recorder.log(float(detach() if detach else loss))


def record(memory: Any) -> Recorder:
    """Have the steps of this process recorded from now on."""
    global recorder
    recorder = Recorder(memory)
    return recorder


def watch_loaders(torch: Any, recorder: Recorder) -> None:
    """Have iterators of ``torch.utils.data.DataLoader`` tell of their batches."""
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
        except Exception:  # a mapping of somebody's own need not be one
            found = 0, 0
        recorder.took(id(self), ended - began, *found)
        return batch

    kind.__next__ = next_batch


def sizes(batch: Any, tensor: type, depth: int = DEPTH) -> tuple[int, int]:
    """Samples (the first dimension of the first tensor) and tokens (elements of ``input_ids``) of a batch."""
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
    """Writes the steps of one optimizer into a ledger; ``flops`` counts those of some."""

    def __init__(self, memory: Any, flops: Flops | None = None) -> None:
        self._memory = memory
        self._traffic = memoryview(memory)[ledger.TRAFFIC_AT : ledger.RECORDED_AT].cast("Q")
        self._waiting = memoryview(memory)[ledger.PROGRESS.size - 8 : ledger.PROGRESS.size].cast("Q")
        self._last = memoryview(memory)[ledger.RECORDED_AT : ledger.RECORDED_AT + 8].cast("Q")
        self._groups = memoryview(memory)[ledger.FIRST_GROUP : ledger.FIRST_STEP].cast("Q")
        self._ended_at = self._waited = 0  # the last step, and the time that was waited by then
        self.communication: Communication | None = None  # of other groups than ccl's, once there are any
        self._others_busy = self._others_bytes = 0  # what that has come to
        self.flops = flops
        self._number = 0  # of the last step
        self._counted: weakref.ref[Any] | None = None  # the optimizer
        self._others = 0  # steps of others since its last one
        self._base = 0  # since when the first step lasts; later by what is no part of any
        # What the next record has: sums from the program's start, and what else is known of its step.
        self.fields: dict[str, float] = {field.name: 0 if field.is_sum else NAN for field in OF_STEPS}
        self._batches: dict[int, list[int]] = {}  # an iterator's samples and tokens, since the last step
        self._latest = 0  # the iterator that was asked last
        self.begins(time.monotonic_ns())
        os.register_at_fork(after_in_child=self._forget)

    def begins(self, now: int, iterator: int = 0) -> None:
        """What comes now belongs to the first step, unless there was one; what came before doesn't.

        The iterator begins as well: the one that had its number before is gone, with what it handed out.
        """
        self._batches.pop(iterator, None)
        if not self._number:
            self._base, self.fields["input"], self._batches = now, 0, {}
            self._write(now)

    def took(self, iterator: int, nanoseconds: int, samples: int, tokens: int) -> None:
        """An iterator has handed out a batch."""
        self.fields["input"] += nanoseconds
        self._latest = iterator
        if (sums := self._batches.get(iterator)) is None:
            self._batches[iterator] = [samples, tokens]
        else:
            sums[0] += samples
            sums[1] += tokens

    def log(self, loss: float) -> None:
        """The loss of the step that has ended, or of the one that comes if that has taken a batch."""
        if self._number and not self._batches:
            at = ledger.FIRST_STEP + self._number % ledger.STEPS * ledger.STEP.size
            ledger.LOSS.pack_into(self._memory, at + ledger.LOSS_AT, loss)
        else:
            self.fields["loss"] = loss

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step."""
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
            # Of several loaders that of the step: the others were for an evaluation, or for other inputs.
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
        """DDP waits for a future of its last bucket, which ccl doesn't see: from its call to its end.

        Nothing is left to compute then.  What ccl has seen may be of the same operation.  Where there is no
        group of ccl, whose records come first, what the others take is counted.
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
        """A forked process is not the rank: what it does goes nowhere."""
        self._memory = nowhere = bytearray(ledger.SIZE)
        self._last = self._waiting = memoryview(nowhere)[:8].cast("Q")
        if self.flops:
            self.flops.leave()
