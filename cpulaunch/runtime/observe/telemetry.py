"""Writes a record of each optimizer step into the rank's ledger, which the agent reads.

If the script has several optimizers, only one optimizer's steps are recorded: the first optimizer that makes
a step, until it is freed or other optimizers make ``OTHERS`` steps in a row.
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
"""Steps of other optimizers in a row, after which one of them is recorded instead."""

DEPTH = 3
"""Maximum levels of nesting that are searched for the first tensor of a batch."""

NAN = math.nan

_UNKNOWN = {field.name: NAN for field in OF_STEPS if not field.is_sum}

_GROUP, _COUNT, _FIRST = ledger.GROUP_BYTES // 8, 9, ledger.GROUP.size // 8
_OPERATION, _ENQUEUED, _COMPLETED = ledger.OPERATION.size // 8, 8, 10
"""Positions of a group's and an operation's fields in the ledger, in units of 8 bytes."""

recorder: Recorder | None = None
"""The recorder of this process; None outside of a job, and without telemetry."""


def log(*, loss: Any) -> None:
    """Add a loss to the job's telemetry: a number, or a tensor with one element.

    The loss belongs to the last optimizer step or, if the script has taken a batch from a ``DataLoader``
    since then, to the next one.  Does nothing outside of a cpulaunch job.
    """
    if recorder is not None:
        detach = getattr(loss, "detach", None)  # torch warns if a tensor with a gradient is converted
        recorder.log(float(detach() if detach else loss))


def watch_loaders(torch: Any, recorder: Recorder) -> None:
    """Report the batches of each ``torch.utils.data.DataLoader`` to ``recorder``."""
    kind = torch.utils.data.dataloader._BaseDataLoaderIter
    original = kind.__next__
    now = time.monotonic_ns
    tensor = torch.Tensor

    @functools.wraps(original)
    def next_batch(self: Any) -> Any:
        began = now()
        if getattr(self, "_num_yielded", None) == 0:
            recorder.begin(began, id(self))
        batch = original(self)
        ended = now()
        try:
            found = sizes(batch, tensor)
        except Exception:  # a mapping of the script may raise one
            found = 0, 0
        recorder.add_batch(id(self), ended - began, *found)
        return batch

    kind.__next__ = next_batch


def sizes(batch: Any, tensor: type, depth: int = DEPTH) -> tuple[int, int]:
    """Return the size of the first tensor's first dimension, and the number of elements of ``input_ids``."""
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
    """Writes the steps of one optimizer into a ledger; ``flops`` counts the FLOPs of some steps."""

    def __init__(self, memory: Any, flops: Flops | None = None) -> None:
        self._memory = memory
        self._traffic = memoryview(memory)[ledger.TRAFFIC_AT : ledger.RECORDED_AT].cast("Q")
        self._waiting = memoryview(memory)[ledger.PROGRESS.size - 8 : ledger.PROGRESS.size].cast("Q")
        self._last = memoryview(memory)[ledger.RECORDED_AT : ledger.RECORDED_AT + 8].cast("Q")
        self._groups = memoryview(memory)[ledger.FIRST_GROUP : ledger.FIRST_STEP].cast("Q")
        self._ended_at = self._waited = 0  # the end of the last step, and the time waited until then
        self.communication: Communication | None = None  # in groups of backends other than ccl
        self._others_busy = self._others_bytes = 0  # sums of ``communication``
        self.flops = flops
        self._number = 0  # of the last step
        self._optimizer: weakref.ref[Any] | None = None  # the optimizer whose steps are recorded
        self._others = 0  # steps of other optimizers since the last recorded step
        self._base = 0  # start of the first step, plus the time that belongs to no step
        # The fields of the next record: sums since the program's start, and values of its step.
        self.fields: dict[str, float] = {field.name: 0 if field.is_sum else NAN for field in OF_STEPS}
        self._batches: dict[int, list[int]] = {}  # iterator → samples and tokens since the last step
        self._latest = 0  # the iterator of the last batch
        self.begin(time.monotonic_ns())
        os.register_at_fork(after_in_child=self._detach)

    def begin(self, now: int, iterator: int = 0) -> None:
        """Make the first step start at ``now``, unless it has already ended.

        Also discards the batches of ``iterator``: they belong to a freed object with the same ``id``.
        """
        self._batches.pop(iterator, None)
        if not self._number:
            self._base, self.fields["input"], self._batches = now, 0, {}
            self._write(now)

    def add_batch(self, iterator: int, nanoseconds: int, samples: int, tokens: int) -> None:
        """Count a batch of ``iterator``, for which the script has waited ``nanoseconds``."""
        self.fields["input"] += nanoseconds
        self._latest = iterator
        if (sums := self._batches.get(iterator)) is None:
            self._batches[iterator] = [samples, tokens]
        else:
            sums[0] += samples
            sums[1] += tokens

    def log(self, loss: float) -> None:
        """Record the loss of the last step, or of the next step if there was a batch since."""
        if self._number and not self._batches:
            at = ledger.FIRST_STEP + self._number % ledger.STEPS * ledger.STEP.size
            ledger.LOSS.pack_into(self._memory, at + ledger.LOSS_AT, loss)
        else:
            self.fields["loss"] = loss

    def end_step(self, optimizer: Any) -> None:
        """Record the end of an optimizer step."""
        current = self._optimizer() if self._optimizer else None
        if current is not optimizer:
            self._others += 1
            if current is not None and self._others < OTHERS:
                return
            self._optimizer = weakref.ref(optimizer)
        self._others = 0
        now = time.monotonic_ns()
        self._number += 1
        self._count_waiting()
        if self._batches:
            # With several loaders, count the loader used last; the others may be for evaluation.
            samples, tokens = self._batches.get(self._latest, (0, 0))
            self.fields["samples"] += samples
            self.fields["tokens"] += tokens
            self._batches.clear()
        if self.flops and (count := self.flops.end_step(self._number)) is not None:
            self.fields["flops"] = count
        self._write(now)
        self.fields |= _UNKNOWN
        if self.flops and self.flops.precision and not self.flops.peak:
            self.flops.measure_peak()
            peak = self.flops.peak, self.flops.precision.encode()
            ledger.PEAK.pack_into(self._memory, ledger.RECORDED_AT + 8, *peak)
            self._base += time.monotonic_ns() - now

    def _count_waiting(self) -> None:
        """Add the time that DDP waited for the last bucket's future, which ccl can't measure.

        This is the time from the call of the step's last collective to its end, as nothing is left to compute
        by then.  The time that ccl has measured in this step is subtracted, because it may be for the same
        collective.  ccl's groups come first in the ledger; if there are none, the times of other backends are
        used.
        """
        groups, called, ended = self._groups, 0, 0
        if self.communication and groups[0] & 0xFFFFFFFF == ledger.FREE:
            self.communication.end_step()
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
            measured = self._waiting[0] - self._waited
            self._waiting[0] += max(0, ended - called - measured)

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

    def _detach(self) -> None:
        """Detach a forked process from the ledger, which belongs to the rank."""
        self._memory = unused = bytearray(ledger.SIZE)
        self._last = self._waiting = memoryview(unused)[:8].cast("Q")
        if self.flops:
            self.flops.stop()
