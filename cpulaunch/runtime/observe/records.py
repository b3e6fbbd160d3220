"""What Python writes into a rank's ledger: its progress, and the groups that ``ccl`` doesn't write."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from cpulaunch import ledger

_STEPS, _PROGRESSED_AT, _LONGEST_GAP = 1, 3, 4  # of the header, 8 bytes each
_COLLECTIVES = ledger.OTHERS_AT // 8


class Header:
    """A ledger's header, except the part that ``ccl`` writes.  Threads may share it."""

    def __init__(self, memory: Any) -> None:
        view = memoryview(memory)[: ledger.HEADER_SIZE]
        self._halves, self._numbers = view.cast("I"), view.cast("Q")
        self._halves[0] = ledger.MAGIC
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    def expect_steps(self) -> None:
        """Note that there is an optimizer."""
        self._halves[1] |= ledger.HAS_OPTIMIZER

    @property
    def steps(self) -> int:
        """The steps of all optimizers."""
        return self._numbers[_STEPS]

    def add_step(self) -> None:
        """Count an optimizer step."""
        self.expect_steps()
        self._add(_STEPS, 1, time.monotonic_ns())

    def add_collectives(self, count: int, at: int) -> None:
        """Count ``count`` completed operations of groups of backends other than ``ccl``."""
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

    def _forget(self) -> None:
        """Detach from the ledger: a forked process is not the rank, and its writes are dropped."""
        self._lock = threading.Lock()  # another thread may have held it
        nowhere = memoryview(bytearray(ledger.HEADER_SIZE))
        self._halves, self._numbers = nowhere.cast("I"), nowhere.cast("Q")


def is_mirrored(backend: str) -> bool:
    """Return whether operations of this backend's groups are copied; ccl writes its own into the ledger.

    ``cpu:ccl`` counts as ccl; ``cpu:gloo,cuda:nccl`` does not.
    """
    return not any(pair.rpartition(":")[::2] in (("", "ccl"), ("cpu", "ccl")) for pair in backend.split(","))


def free_slot(memory: Any, *, spare: int = 0) -> int:
    """Return a group's place that is free and empty, or -1; from the end, as ccl takes the first ones.

    ``spare``: the number of further places that must stay free.
    """
    places = [ledger.FIRST_GROUP + slot * ledger.GROUP_BYTES for slot in range(ledger.GROUPS)]
    states = [ledger.GROUP.unpack_from(memory, at)[0] for at in places]
    usable = [
        slot
        for wanted in (ledger.FREE, ledger.CLOSED)
        for slot in reversed(range(ledger.GROUPS))
        if states[slot] == wanted
    ]
    if len(usable) <= spare:
        return -1
    clear(memory, usable[0])
    return usable[0]


def clear(memory: Any, slot: int) -> None:
    """Free the place ``slot``."""
    _fill(memory, slot, bytes(ledger.GROUP_BYTES))


def write(memory: Any, slot: int, group: ledger.Group) -> None:
    """Write ``group`` to the place ``slot``.

    Operations under way come first, from the oldest, because a rank may hang in them.  The latest of the
    other operations fill the remaining places.
    """
    operations = sorted(group.operations, key=lambda each: each.enqueued)
    under_way = [each for each in operations if each.state == ledger.STARTED][: ledger.OPERATIONS]
    others = [each for each in operations if each.state != ledger.STARTED]
    room = ledger.OPERATIONS - len(under_way)
    text = bytearray(ledger.GROUP_BYTES)
    backend, name, members = (said.encode() for said in (group.backend, group.name, group.members))
    numbers = group.size, group.rank, group.count
    ledger.GROUP.pack_into(text, 0, ledger.OPEN, backend, name, *numbers, members)
    for n, each in enumerate([*under_way, *others[::-1][:room]]):
        at = ledger.GROUP.size + n * ledger.OPERATION.size
        sequence, state, kind, type_, *figures, waits_for, root, thread, reduction = each
        fields = kind.encode(), type_.encode(), *figures, thread, waits_for.encode(), reduction.encode()
        ledger.OPERATION.pack_into(text, at, sequence, state, root + 1, *fields)
    _fill(memory, slot, text)


def _fill(memory: Any, slot: int, text: bytes | bytearray) -> None:
    at = ledger.FIRST_GROUP + slot * ledger.GROUP_BYTES
    memory[at : at + ledger.GROUP_BYTES] = text
