"""Writes a rank's progress, and its groups of backends other than ccl, to the ledger."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from cpulaunch import ledger

_STEPS, _PROGRESSED_AT, _LONGEST_GAP = 1, 3, 4  # positions in the header, in units of 8 bytes
_COLLECTIVES = ledger.OTHERS_AT // 8


class Header:
    """The fields of the ledger's header that Python writes.  Several threads may use it."""

    def __init__(self, memory: Any) -> None:
        view = memoryview(memory)[: ledger.HEADER_SIZE]
        self._halves, self._numbers = view.cast("I"), view.cast("Q")
        self._halves[0] = ledger.MAGIC
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._detach)

    def expect_steps(self) -> None:
        """Record that the program has an optimizer."""
        self._halves[1] |= ledger.HAS_OPTIMIZER

    @property
    def steps(self) -> int:
        """The number of steps of all optimizers."""
        return self._numbers[_STEPS]

    def add_step(self) -> None:
        """Count an optimizer step."""
        self.expect_steps()
        self._add(_STEPS, 1, time.monotonic_ns())

    def add_collectives(self, count: int, at: int) -> None:
        """Add completed operations of groups of backends other than ``ccl``."""
        self._add(_COLLECTIVES, count, at)

    def _add(self, field: int, count: int, at: int) -> None:
        with self._lock:
            numbers = self._numbers
            numbers[field] += count
            if (before := numbers[_PROGRESSED_AT]) >= at:
                return
            if before and at - before > numbers[_LONGEST_GAP]:
                numbers[_LONGEST_GAP] = at - before
            numbers[_PROGRESSED_AT] = at

    def _detach(self) -> None:
        """Detach a forked process from the ledger, which belongs to the rank."""
        self._lock = threading.Lock()  # another thread may hold the old one
        unused = memoryview(bytearray(ledger.HEADER_SIZE))
        self._halves, self._numbers = unused.cast("I"), unused.cast("Q")


def is_mirrored(backend: str) -> bool:
    """Return whether the mirror copies groups of this backend; ccl itself writes to the ledger.

    ``cpu:ccl`` counts as ccl; ``cpu:gloo,cuda:nccl`` does not.
    """
    return not any(pair.rpartition(":")[::2] in (("", "ccl"), ("cpu", "ccl")) for pair in backend.split(","))


def free_slot(memory: Any, *, spare: int = 0) -> int:
    """Clear and return the last free slot, or else the last one of a closed group; -1 if there is neither.

    ccl uses the first slots.  ``spare``: the number of other slots that must stay free.
    """
    starts = [ledger.FIRST_GROUP + slot * ledger.GROUP_BYTES for slot in range(ledger.GROUPS)]
    states = [ledger.GROUP.unpack_from(memory, at)[0] for at in starts]
    usable = [
        slot
        for state in (ledger.FREE, ledger.CLOSED)
        for slot in reversed(range(ledger.GROUPS))
        if states[slot] == state
    ]
    if len(usable) <= spare:
        return -1
    clear(memory, usable[0])
    return usable[0]


def clear(memory: Any, slot: int) -> None:
    """Mark ``slot`` as free."""
    _fill(memory, slot, bytes(ledger.GROUP_BYTES))


def write(memory: Any, slot: int, group: ledger.Group) -> None:
    """Write ``group`` to ``slot``: first the oldest operations under way, then the latest others.

    If the rank hangs, it waits in an operation under way.
    """
    operations = sorted(group.operations, key=lambda each: each.enqueued)
    under_way = [each for each in operations if each.state == ledger.STARTED][: ledger.OPERATIONS]
    others = [each for each in operations if each.state != ledger.STARTED]
    room = ledger.OPERATIONS - len(under_way)
    record = bytearray(ledger.GROUP_BYTES)
    backend, name, members = (text.encode() for text in (group.backend, group.name, group.members))
    numbers = group.size, group.rank, group.count
    ledger.GROUP.pack_into(record, 0, ledger.OPEN, backend, name, *numbers, members)
    for n, each in enumerate([*under_way, *others[::-1][:room]]):
        at = ledger.GROUP.size + n * ledger.OPERATION.size
        sequence, state, kind, type_, *figures, waits_for, root, thread, reduction = each
        fields = kind.encode(), type_.encode(), *figures, thread, waits_for.encode(), reduction.encode()
        ledger.OPERATION.pack_into(record, at, sequence, state, root + 1, *fields)
    _fill(memory, slot, record)


def _fill(memory: Any, slot: int, record: bytes | bytearray) -> None:
    at = ledger.FIRST_GROUP + slot * ledger.GROUP_BYTES
    memory[at : at + ledger.GROUP_BYTES] = record
