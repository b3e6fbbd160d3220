"""A rank's ledger: a small shared file with the rank's latest operations and steps, which its agent reads.

The agent makes the file (``memfd_create``), and the program inherits and maps it. The agent can therefore
read it without the program's help, and even after SIGKILL. The process group ``ccl`` writes its own
operations (``ccl/csrc/layer/ledger.hpp`` has the same layout). `runtime.observe` writes those of other
backends, and the optimizers' steps. There are no locks: a reader may see a record half written. That can't
happen for a rank that hangs.

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
"""The first bytes of a ledger with this layout."""

SIZE = 3 << 15
"""Bytes of the file."""

HEADER_SIZE = 128
"""Bytes of the header: ``PROGRESS``, ``TRAFFIC``, ``RECORDED``, ``OTHERS``, ``LOOKED``."""

PROGRESS = struct.Struct("=IIQQQQQ")
"""``MAGIC``, flags, then steps, collectives of ccl, progressed_at, longest_gap, waiting of ``Progress``.

Each count has one writer, so that no increment is lost: ``ccl`` counts its own collectives, and Python counts
the others. Both write ``progressed_at`` and the longest gap. Neither value ever falls, and two writers at the
same moment measure the same gap or none.
"""

TRAFFIC = struct.Struct("=QQQQ")
"""ccl's collectives and messages: their number under way, the time since which at least one is under way, the
total time before that with at least one under way, and the bytes of all so far."""

RECORDED = struct.Struct("=Qd8s")
"""The number of the last ``STEP`` record; the measured peak of this rank's cores in FLOP/s, or 0; and the
precision of that peak."""

OTHERS = struct.Struct("=Q")
"""The number of collectives on groups of backends other than ccl."""

LOOKED = struct.Struct("=Q")
"""When the groups of other backends were last copied here; 0 if they never were."""

TRAFFIC_AT = PROGRESS.size
RECORDED_AT = TRAFFIC_AT + TRAFFIC.size
OTHERS_AT = RECORDED_AT + RECORDED.size
LOOKED_AT = OTHERS_AT + OTHERS.size

HAS_OPTIMIZER = 1
"""Flag: the program has made an optimizer, so steps are expected."""

GROUPS, OPERATIONS = 32, 16
"""The number of groups that fit, and the number of latest operations that are kept for each."""

GROUP = struct.Struct("=I12s48sIIQ48s")
"""A group, 128 bytes: state, backend, name, size, this rank's number in it, the number of operations so far,
and the members, if known. Operation n, counted from 1, is in record (n - 1) % ``OPERATIONS`` of the group. If
an older operation in that record is still under way, the newer operation is left out: a rank hangs in the
older one."""

MEMBERS_BYTES = 48

FREE, OPEN, CLOSED = 0, 1, 2
"""States of a group. A new group may overwrite a closed one when the ledger is full."""

OPERATION = struct.Struct("=QII28s12sQQQQiI16s16s")
"""An operation, 128 bytes: sequence number, state, root + 1, kind, type, bytes, enqueued, started, completed,
peer, the kernel's id of the calling thread or 0, the ranks of the group that it waits for as text, such as
``3, 7`` or ``10, 11, …``, and the reduction."""

ENQUEUED, STARTED, COMPLETED, FAILED = 1, 2, 3, 4
"""States of an operation."""

_UNDER_WAY = (ENQUEUED, STARTED)

MEETING, NEW_GROUP = "init_process_group", "new_group"
"""The only operation of a group without a backend. It is under way while the ranks make the group."""

MEETINGS = (MEETING, NEW_GROUP)

REQUEST = struct.Struct("=QQQ232s")
"""The agent's request to the program, 256 bytes: the request's number, the first and the last step to trace,
and the directory for the file ``TRACE_FILE``. The number is written last. A first step of 0 ends the trace.
The request occupies the last bytes of the file."""

REQUEST_AT = SIZE - REQUEST.size
TRACE_FILE = "trace.json"

GROUP_BYTES = GROUP.size + OPERATIONS * OPERATION.size
FIRST_GROUP = HEADER_SIZE

STEPS = 256
"""The number of steps that are kept. Step n is in record n % ``STEPS``."""

STEP = struct.Struct("=QQ" + "".join("Q" if field.is_sum else "d" for field in OF_STEPS))
"""An optimizer step: its number, when it ended, and the fields of ``telemetry.OF_STEPS``. Step 0 marks the
beginning of the first step."""

FIRST_STEP = FIRST_GROUP + GROUPS * GROUP_BYTES

LOSS = struct.Struct("=d")
LOSS_AT = 8 * (2 + [field.name for field in OF_STEPS].index("loss"))
"""The loss in a ``STEP`` record."""

PEAK = struct.Struct("=d8s")
"""The peak and its precision, as in ``RECORDED``."""


of_this_process: mmap.mmap | None = None
"""The ledger of this rank, if the process is a rank's program. The bootstrap sets it after importing this
module."""


class Progress(NamedTuple):
    """How far a rank is.

    ``steps`` counts optimizer steps, and ``collectives`` counts completed collectives and messages.
    ``progressed_at`` is when either count last rose, and ``longest_gap`` the longest time between two such
    moments. ``waiting`` is how long the program's threads have waited for collectives. Times are in
    nanoseconds. ``expects_steps`` is true if the program has an optimizer.
    """

    steps: int
    collectives: int
    progressed_at: int
    longest_gap: int
    waiting: int
    expects_steps: bool


NONE = Progress(0, 0, 0, 0, 0, False)
"""The progress of a program that has done nothing yet."""


class Step(NamedTuple):
    """An optimizer step of a rank, recorded when it ended.

    ``number`` counts from 1. ``ended_at`` is in nanoseconds. ``fields`` are the fields of
    ``telemetry.OF_STEPS``. Sums count from the program's start, with times in nanoseconds; other fields have
    the step's own value, or NaN.
    """

    number: int
    ended_at: int
    fields: dict[str, float]


class Recorded(NamedTuple):
    """The number of the ``last`` step, the rank's ``precision``, and the ``peak`` of its cores.

    The peak is in FLOP/s; 0 if unknown.
    """

    last: int
    peak: float
    precision: str


class Operation(NamedTuple):
    """One collective or message.

    ``sequence`` counts the group's collectives, or its messages. ``peer`` is the other rank of a message,
    numbered in the group, or -1. ``bytes`` is the size of this rank's tensors. ``root`` is the root of a
    broadcast or reduce, numbered in the group, or -1 if it is unknown. ``thread`` is the id of the calling
    thread, or 0 if it is unknown. ``reduction`` is how ccl reduces, such as ``sum``; it is empty for other
    operations and other backends.
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
        """Whether this is a message to or from one rank. ``peer`` is -1 if it may come from any rank."""
        return self.peer >= 0 or "recv" in self.kind


def members_text(ranks: Sequence[int]) -> str:
    """A group's members in the ledger's format; empty if they don't fit, or are not in ascending order."""
    if list(ranks) != sorted(set(ranks)):
        return ""
    steps = {after - before for before, after in pairwise(ranks)}
    evenly = f"{ranks[0]}-{ranks[-1]}:{steps.pop()}" if len(steps) == 1 else ""
    texts = (str(CoreSet(ranks)), evenly)
    return next((text for text in texts if len(text) <= MEMBERS_BYTES), "")


class Group(NamedTuple):
    """A process group with its latest operations, in the order of the calls.

    ``count`` is the number of all calls.

    ``members`` are the job's ranks in the group, such as ``0-3`` or ``0-6:2``; empty if they are unknown.
    """

    name: str
    backend: str
    size: int
    rank: int
    count: int  # type: ignore[assignment]
    operations: tuple[Operation, ...]
    members: str = ""


class TraceRequest(NamedTuple):
    """Which steps the program shall trace, and the directory for the trace."""

    number: int
    first: int
    last: int
    directory: str


def request_trace(ledger: mmap.mmap, request: TraceRequest) -> None:
    """Ask the program for a trace.  Raises ValueError if the directory's name is too long."""
    number, first, last, directory = request
    if len(name := os.fsencode(directory)) >= 232:
        raise ValueError(directory)
    REQUEST.pack_into(ledger, REQUEST_AT, REQUEST.unpack_from(ledger, REQUEST_AT)[0], first, last, name)
    struct.pack_into("=Q", ledger, REQUEST_AT, number)


def trace_request(ledger: mmap.mmap | memoryview) -> TraceRequest:
    """The last request for a trace. Its number is 0 if there was none."""
    number, first, last, directory = REQUEST.unpack_from(ledger, REQUEST_AT)
    return TraceRequest(number, first, last, os.fsdecode(directory.partition(b"\0")[0]))


def progress(ledger: bytes | memoryview | mmap.mmap) -> Progress | None:
    """The progress in the header; None if nobody has written the header."""
    magic, flags, steps, collectives, at, gap, waiting = PROGRESS.unpack_from(ledger)
    (others,) = OTHERS.unpack_from(ledger, OTHERS_AT)
    if magic != MAGIC:
        return None
    return Progress(steps, collectives + others, at, gap, waiting, bool(flags & HAS_OPTIMIZER))


def recorded(ledger: bytes | memoryview | mmap.mmap) -> Recorded:
    """The number of the last recorded step, and the peak of the rank's cores."""
    last, peak, precision = RECORDED.unpack_from(ledger, RECORDED_AT)
    return Recorded(last, peak, _text(precision))


def step(ledger: bytes | memoryview | mmap.mmap, number: int) -> Step | None:
    """The step with this number; None if it has not ended, or a later step has overwritten it."""
    there, ended_at, *values = STEP.unpack_from(ledger, FIRST_STEP + number % STEPS * STEP.size)
    fields = {field.name: value for field, value in zip(OF_STEPS, values, strict=True)}
    return Step(number, ended_at, fields) if there == number and ended_at else None


def looked_at(ledger: bytes | memoryview | mmap.mmap) -> int:
    """When groups of backends other than ccl were last copied here; 0 if they never were."""
    return int(LOOKED.unpack_from(ledger, LOOKED_AT)[0])


def backends(ledger: bytes | memoryview | mmap.mmap) -> set[str]:
    """The backends of all groups in the ledger, open or closed."""
    places = (FIRST_GROUP + number * GROUP_BYTES for number in range(GROUPS))
    found = (GROUP.unpack_from(ledger, at) for at in places)
    return {name for state, backend, *_ in found if state in (OPEN, CLOSED) and (name := _text(backend))}


def groups(ledger: bytes | memoryview | mmap.mmap, *, closed: bool = False) -> list[Group]:
    """The open groups; with ``closed``, the closed ones instead."""
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
    """When the oldest operation that is under way was called; 0 if none is under way."""
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
