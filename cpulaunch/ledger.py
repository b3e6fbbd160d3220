"""A rank's ledger: what it has done last, in a small file mapping that its agent reads.

The agent makes the file (``memfd_create``), the program inherits it and maps it, so it is still there after
SIGKILL, and reading it takes no help of the program.  Writers are the process group ``ccl``
(``ccl/csrc/layer/ledger.hpp`` has the same layout), and for other backends and optimizers `runtime.observe`.
Nothing is locked: a record that is being written may be read half old, half new, which doesn't happen to a
rank that hangs.

Times are in nanoseconds of the monotonic clock, 0 where something hasn't happened.  Numbers are in the
machine's own byte order.  Agents import this module when they start.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from cpulaunch.model.cores import CoreSet
from cpulaunch.telemetry import OF_STEPS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap

MAGIC = 0x4C505504
"""Of this layout."""

SIZE = 3 << 15
"""Bytes of the file."""

HEADER_SIZE = 128
"""Bytes of the header: ``PROGRESS``, ``TRAFFIC``, ``RECORDED``, ``OTHERS``, ``LOOKED``."""

PROGRESS = struct.Struct("=IIQQQQQ")
"""``MAGIC``, flags, then steps, collectives of ccl, progressed_at, longest_gap, waiting of ``Progress``.

Each count has one writer, so that none is lost: ``ccl`` of its own collectives, and Python of the others.
Both write when something was completed, which only ever rises, and the longest gap: who comes at the same
time as another one finds the same gap as that, or none.
"""

TRAFFIC = struct.Struct("=QQQQ")
"""Of ccl's collectives and messages: how many are under way, since when any was, how long any was before
that, and the bytes of all so far."""

RECORDED = struct.Struct("=Qd8s")
"""The number of the last of ``STEP``; what this rank's cores were measured to reach in FLOP/s, or 0, and in
which precision."""

OTHERS = struct.Struct("=Q")
"""Collectives of other groups than those of ccl."""

LOOKED = struct.Struct("=Q")
"""When these groups were last copied here; 0 where they never were."""

TRAFFIC_AT = PROGRESS.size
RECORDED_AT = TRAFFIC_AT + TRAFFIC.size
OTHERS_AT = RECORDED_AT + RECORDED.size
LOOKED_AT = OTHERS_AT + OTHERS.size

HAS_OPTIMIZER = 1
"""Flag: an optimizer was made, so that a step is to be expected."""

GROUPS, OPERATIONS = 32, 16
"""Groups that have room; the last operations that are kept of each."""

GROUP = struct.Struct("=I12s48sIIQ48s")
"""Of a group, 128 bytes: its state, backend, name, size, this rank's number in it, how many operations it has
had, and its members, where they are said; number n of the operations, from 1, is in record
(n - 1) % ``OPERATIONS`` of the group, but not in the ledger where one that is still under way has that
record: those are what a rank hangs in."""

MEMBERS_BYTES = 48

FREE, OPEN, CLOSED = 0, 1, 2
"""States of a group.  Where there is no room, one that is closed makes some."""

OPERATION = struct.Struct("=QII28s12sQQQQiI16s16s")
"""Of an operation, 128 bytes: its sequence number, state, root + 1, kind, type, bytes, enqueued, started,
completed, peer, the thread that has called it, by the kernel's number, or 0, ranks of the group that it
waits for as a text, such as ``3, 7``, or ``10, 11, …``, and the reduction."""

ENQUEUED, STARTED, COMPLETED, FAILED = 1, 2, 3, 4
"""States of an operation."""

_UNDER_WAY = (ENQUEUED, STARTED)

MEETING, NEW_GROUP = "init_process_group", "new_group"
"""The only operation of a group without a backend, which is there while the ranks make it."""

MEETINGS = (MEETING, NEW_GROUP)

REQUEST = struct.Struct("=QQQ232s")
"""What the agent asks of the program, 256 bytes: the request's number, the first and the last step to trace,
and the directory for the trace's file ``TRACE_FILE``.  The number is written last; no first step: trace
nothing any more.  These are the file's last bytes."""

REQUEST_AT = SIZE - REQUEST.size
TRACE_FILE = "trace.json"

GROUP_BYTES = GROUP.size + OPERATIONS * OPERATION.size
FIRST_GROUP = HEADER_SIZE

STEPS = 256
"""Steps that are kept: that with number n is in record n % ``STEPS``."""

STEP = struct.Struct("=QQ" + "".join("Q" if field.is_sum else "d" for field in OF_STEPS))
"""Of an optimizer step: its number, when it ended, and the fields of ``telemetry.OF_STEPS``.  Number 0 is
where the first step begins."""

FIRST_STEP = FIRST_GROUP + GROUPS * GROUP_BYTES

LOSS = struct.Struct("=d")
LOSS_AT = 8 * (2 + [field.name for field in OF_STEPS].index("loss"))
"""Of a step, its loss alone."""

PEAK = struct.Struct("=d8s")
"""Of ``RECORDED``, all but the number."""


of_this_process: mmap.mmap | None = None
"""In a rank's program: its ledger, which the bootstrap puts here when this module is loaded."""


class Progress(NamedTuple):
    """How far a rank is.

    ``steps`` of optimizers, ``collectives`` that were completed (messages, too), when either last rose
    (``progressed_at``), the longest time between two such moments, and how long the program's threads have
    waited for collectives, all in nanoseconds.  ``expects_steps``: it has an optimizer.
    """

    steps: int
    collectives: int
    progressed_at: int
    longest_gap: int
    waiting: int
    expects_steps: bool


NONE = Progress(0, 0, 0, 0, 0, False)
"""That of a program which has done nothing yet."""


class Step(NamedTuple):
    """Where a rank stood at the end of an optimizer step.

    ``number`` counts from 1, ``ended_at`` is when.  ``fields`` are those of ``telemetry.OF_STEPS``: sums from
    the program's start, times in nanoseconds; of others the step's own value, or NaN.
    """

    number: int
    ended_at: int
    fields: dict[str, float]


class Recorded(NamedTuple):
    """The ``last`` step's number, and the peak of the rank's cores in FLOP/s, or 0, in a ``precision``."""

    last: int
    peak: float
    precision: str


class Operation(NamedTuple):
    """One collective or message.

    ``sequence`` counts those of the group's collectives, or of its messages.  ``peer`` is a message's other
    rank in the group, else -1.  ``bytes`` are the tensors' of this rank.  ``root`` is that of a broadcast or
    reduce in the group, where it is known, else -1.  ``thread`` has called it; 0 where that isn't known.
    ``reduction`` is how ccl reduces, such as ``sum``; "" where nothing is, and of other backends.
    """

    sequence: int
    state: int
    kind: str
    type: str
    bytes: int
    enqueued: int
    started: int
    completed: int
    peer: int
    waits_for: str
    root: int = -1
    thread: int = 0
    reduction: str = ""

    @property
    def is_message(self) -> bool:
        """Whether it goes to or from one rank, which may be any (``peer`` is -1)."""
        return self.peer >= 0 or "recv" in self.kind


def members_text(ranks: Sequence[int]) -> str:
    """A group's members as the ledger has them; empty where they have no room, or are in another order."""
    if list(ranks) != sorted(set(ranks)):
        return ""
    steps = {after - before for before, after in pairwise(ranks)}
    evenly = f"{ranks[0]}-{ranks[-1]}:{steps.pop()}" if len(steps) == 1 else ""
    texts = (str(CoreSet(ranks)), evenly)
    return next((text for text in texts if len(text) <= MEMBERS_BYTES), "")


class Group(NamedTuple):
    """A process group: its last operations, in the order in which they were called, of ``count``.

    ``members`` are the job's ranks in it, such as ``0-3`` or ``0-6:2``; empty where nobody says them.
    """

    name: str
    backend: str
    size: int
    rank: int
    count: int  # type: ignore[assignment]
    operations: tuple[Operation, ...]
    members: str = ""


class TraceRequest(NamedTuple):
    """Which steps the program is to trace, and where it writes them to."""

    number: int
    first: int
    last: int
    directory: str


def request_trace(ledger: mmap.mmap, request: TraceRequest) -> None:
    """Ask the program for a trace.  Raises ValueError where the directory's name is too long."""
    number, first, last, directory = request
    if len(name := os.fsencode(directory)) >= 232:
        raise ValueError(directory)
    REQUEST.pack_into(ledger, REQUEST_AT, REQUEST.unpack_from(ledger, REQUEST_AT)[0], first, last, name)
    struct.pack_into("=Q", ledger, REQUEST_AT, number)


def trace_request(ledger: mmap.mmap | memoryview) -> TraceRequest:
    """What was asked last; number 0: nothing was."""
    number, first, last, directory = REQUEST.unpack_from(ledger, REQUEST_AT)
    return TraceRequest(number, first, last, os.fsdecode(directory.partition(b"\0")[0]))


def progress(ledger: bytes | memoryview | mmap.mmap) -> Progress | None:
    """What the header says; None where nobody has written it."""
    magic, flags, steps, collectives, at, gap, waiting = PROGRESS.unpack_from(ledger)
    (others,) = OTHERS.unpack_from(ledger, OTHERS_AT)
    if magic != MAGIC:
        return None
    return Progress(steps, collectives + others, at, gap, waiting, bool(flags & HAS_OPTIMIZER))


def recorded(ledger: bytes | memoryview | mmap.mmap) -> Recorded:
    """Up to where steps are recorded."""
    last, peak, precision = RECORDED.unpack_from(ledger, RECORDED_AT)
    return Recorded(last, peak, _text(precision))


def step(ledger: bytes | memoryview | mmap.mmap, number: int) -> Step | None:
    """The step with this number; None where another one has its place by now, or has not ended."""
    there, ended_at, *values = STEP.unpack_from(ledger, FIRST_STEP + number % STEPS * STEP.size)
    fields = {field.name: value for field, value in zip(OF_STEPS, values, strict=True)}
    return Step(number, ended_at, fields) if there == number and ended_at else None


def looked_at(ledger: bytes | memoryview | mmap.mmap) -> int:
    """When groups of other backends than ccl were last copied here; 0 where they never were."""
    return int(LOOKED.unpack_from(ledger, LOOKED_AT)[0])


def backends(ledger: bytes | memoryview | mmap.mmap) -> set[str]:
    """Those of the groups that there are, or were."""
    places = (FIRST_GROUP + number * GROUP_BYTES for number in range(GROUPS))
    found = (GROUP.unpack_from(ledger, at) for at in places)
    return {name for state, backend, *_ in found if state in (OPEN, CLOSED) and (name := _text(backend))}


def groups(ledger: bytes | memoryview | mmap.mmap, *, closed: bool = False) -> list[Group]:
    """The groups that are open, or those that are ``closed``."""
    found = []
    for number in range(GROUPS):
        at = FIRST_GROUP + number * GROUP_BYTES
        state, backend, name, size, rank, count, members = GROUP.unpack_from(ledger, at)
        if state == (CLOSED if closed else OPEN):
            first = at + GROUP.size
            records = range(first, first + OPERATIONS * OPERATION.size, OPERATION.size)
            kept = [operation for record in records if (operation := _operation(ledger, record)).state]
            kept.sort(key=lambda operation: operation.enqueued)
            said = _text(name), _text(backend), size, rank, count, tuple(kept), _text(members)
            found.append(Group(*said))
    return found


def waits_since(ledger: bytes | memoryview | mmap.mmap) -> int:
    """When the oldest operation that is under way was called; 0 where none is."""
    under_way = (each for group in groups(ledger) for each in group.operations if each.state in _UNDER_WAY)
    return min((each.enqueued for each in under_way), default=0)


def _operation(ledger: bytes | memoryview | mmap.mmap, at: int) -> Operation:
    sequence, state, root, kind, type_, size, enqueued, started, completed, peer, thread, waits_for, by = (
        OPERATION.unpack_from(ledger, at)
    )
    return Operation(
        sequence,
        state,
        _text(kind),
        _text(type_),
        size,
        enqueued,
        started,
        completed,
        peer,
        _text(waits_for),
        root - 1,
        thread,
        _text(by),
    )


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")
