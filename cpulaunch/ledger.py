"""The ledger of a rank: a memory file with the rank's latest operations and steps, which its agent reads.

The agent creates the file (``memfd_create``), and the program inherits and maps it.  So the agent can read it
without the program's help, even after SIGKILL.  The process group ``ccl`` writes its own operations
(``ccl/csrc/layer/ledger.hpp`` has the same layout).  `runtime.observe` writes operations of other backends,
and optimizer steps.  There are no locks, so a reader may see a half-written record, but not of a rank that
hangs.

Times are in nanoseconds of the monotonic clock; 0 means that an event has not happened.  Numbers have the
machine's byte order.  Agents import this module when they start.
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
"""First bytes of a ledger with this layout."""

SIZE = 3 << 15
"""Bytes of the file."""

HEADER_SIZE = 128
"""Bytes of the header: ``PROGRESS``, ``TRAFFIC``, ``RECORDED``, ``OTHERS``, ``LOOKED``."""

PROGRESS = struct.Struct("=IIQQQQQ")
"""``MAGIC``, flags, and from ``Progress``: steps, ccl's collectives, progressed_at, longest_gap, waiting.

Each count has one writer, so that no increment is lost: ``ccl`` counts its own collectives, and Python counts
those of other backends.  Both write ``progressed_at`` and ``longest_gap``, which never fall.
"""

TRAFFIC = struct.Struct("=QQQQ")
"""ccl's collectives and messages: the number of pending ones, the time since when at least one is pending,
the total time before with at least one pending, and the bytes of all so far."""

RECORDED = struct.Struct("=Qd8s")
"""The number of the last ``STEP`` record, the peak of this rank's cores in FLOP/s (0: not measured), and the
precision of this peak."""

OTHERS = struct.Struct("=Q")
"""Number of collectives of backends other than ccl."""

LOOKED = struct.Struct("=Q")
"""When the groups of other backends were last copied to the ledger; 0: never."""

TRAFFIC_AT = PROGRESS.size
RECORDED_AT = TRAFFIC_AT + TRAFFIC.size
OTHERS_AT = RECORDED_AT + RECORDED.size
LOOKED_AT = OTHERS_AT + OTHERS.size

HAS_OPTIMIZER = 1
"""Flag: the program has made an optimizer, so steps are expected."""

GROUPS, OPERATIONS = 32, 16
"""Maximum number of groups, and number of latest operations of each."""

GROUP = struct.Struct("=I12s48sIIQ48s")
"""A group, 128 bytes: state, backend, name, size, this rank's number in it, the number of operations so far,
and the members, if known.  Operation n, counted from 1, is in record (n - 1) % ``OPERATIONS`` of the group.
A record with a pending operation is not overwritten, as a rank hangs in the oldest operation."""

MEMBERS_BYTES = 48

FREE, OPEN, CLOSED = 0, 1, 2
"""States of a group.  If the ledger is full, a new group overwrites a closed one."""

OPERATION = struct.Struct("=QII28s12sQQQQiI16s16s")
"""An operation, 128 bytes: sequence number, state, root + 1, kind, type, bytes, enqueued, started, completed,
peer, the kernel's id of the calling thread or 0, the ranks of the group that it waits for, as text such as
``3, 7`` or ``10, 11, …``, and the reduction."""

ENQUEUED, STARTED, COMPLETED, FAILED = 1, 2, 3, 4
"""States of an operation."""

_PENDING = (ENQUEUED, STARTED)

MEETING, NEW_GROUP = "init_process_group", "new_group"
"""Kinds of operations that are pending while ranks make a group.  Their group has no backend."""

MEETINGS = (MEETING, NEW_GROUP)

REQUEST = struct.Struct("=QQQ232s")
"""The agent's request for a trace, in the last 256 bytes of the file: its number, the first and the last
step, and the directory for the file ``TRACE_FILE``.  The number is written last.  A first step of 0 ends the
trace."""

REQUEST_AT = SIZE - REQUEST.size
TRACE_FILE = "trace.json"

GROUP_BYTES = GROUP.size + OPERATIONS * OPERATION.size
FIRST_GROUP = HEADER_SIZE

STEPS = 256
"""Number of latest steps that are kept.  Step n is in record n % ``STEPS``."""

STEP = struct.Struct("=QQ" + "".join("Q" if field.is_sum else "d" for field in OF_STEPS))
"""An optimizer step: its number, when it ended, and the fields of ``telemetry.OF_STEPS``.  The end of step 0
is the beginning of the first step."""

FIRST_STEP = FIRST_GROUP + GROUPS * GROUP_BYTES

LOSS = struct.Struct("=d")
LOSS_AT = 8 * (2 + [field.name for field in OF_STEPS].index("loss"))
"""Offset of the loss in a ``STEP`` record."""

PEAK = struct.Struct("=d8s")
"""The peak and its precision, as in ``RECORDED``."""


of_this_process: mmap.mmap | None = None
"""The ledger of this process, if it is a rank's program.  The bootstrap sets it."""


class Progress(NamedTuple):
    """The progress of a rank.  Times are in nanoseconds."""

    steps: int  # of the optimizer
    collectives: int  # completed collectives and messages
    progressed_at: int  # when either count last rose
    longest_gap: int  # longest time between two increases
    waiting: int  # total time in which threads have waited for collectives
    expects_steps: bool  # the program has an optimizer


NONE = Progress(0, 0, 0, 0, 0, False)
"""The progress of a program at its start."""


class Step(NamedTuple):
    """An optimizer step of a rank.

    ``fields`` are those of ``telemetry.OF_STEPS``.  Sums count from the start of the program, and their times
    are in nanoseconds.  Other fields have the value of the step, or NaN.
    """

    number: int  # from 1
    ended_at: int
    fields: dict[str, float]


class Recorded(NamedTuple):
    """The contents of ``RECORDED``."""

    last: int  # number of the last step
    peak: float  # of the rank's cores in FLOP/s; 0 if unknown
    precision: str


class Operation(NamedTuple):
    """One collective or message.  Ranks are numbered in the group."""

    sequence: int  # number among the group's collectives, or among its messages
    state: int
    kind: str
    type: str
    bytes: int  # of this rank's tensors
    enqueued: int
    started: int
    completed: int
    peer: int  # the other rank of a message, or -1
    waits_for: str
    root: int = -1  # -1 if there is none, or if it is unknown
    thread: int = 0  # id of the calling thread; 0 if unknown
    reduction: str = ""  # of ccl, such as sum

    @property
    def is_message(self) -> bool:
        """Whether this is a message, whose ``peer`` is -1 if it may come from any rank."""
        return self.peer >= 0 or "recv" in self.kind


def members_text(ranks: Sequence[int]) -> str:
    """Return a group's members as text; empty if it is too long, or if ranks are not in ascending order."""
    if list(ranks) != sorted(set(ranks)):
        return ""
    steps = {after - before for before, after in pairwise(ranks)}
    evenly = f"{ranks[0]}-{ranks[-1]}:{steps.pop()}" if len(steps) == 1 else ""
    texts = (str(CoreSet(ranks)), evenly)
    return next((text for text in texts if len(text) <= MEMBERS_BYTES), "")


class Group(NamedTuple):
    """A process group with its latest operations."""

    name: str
    backend: str
    size: int
    rank: int
    count: int  # type: ignore[assignment]  # of all operations so far
    operations: tuple[Operation, ...]  # in the order of their calls
    members: str = ""  # numbered in the job, such as 0-3 or 0-6:2; empty if unknown


class TraceRequest(NamedTuple):
    """A request to trace steps into a directory."""

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
    """Return the last request for a trace, whose number is 0 if there was none."""
    number, first, last, directory = REQUEST.unpack_from(ledger, REQUEST_AT)
    return TraceRequest(number, first, last, os.fsdecode(directory.partition(b"\0")[0]))


def progress(ledger: bytes | memoryview | mmap.mmap) -> Progress | None:
    """Return the progress; None if the program has not written the header."""
    magic, flags, steps, collectives, at, gap, waiting = PROGRESS.unpack_from(ledger)
    (others,) = OTHERS.unpack_from(ledger, OTHERS_AT)
    if magic != MAGIC:
        return None
    return Progress(steps, collectives + others, at, gap, waiting, bool(flags & HAS_OPTIMIZER))


def recorded(ledger: bytes | memoryview | mmap.mmap) -> Recorded:
    """Return the contents of ``RECORDED``."""
    last, peak, precision = RECORDED.unpack_from(ledger, RECORDED_AT)
    return Recorded(last, peak, _text(precision))


def step(ledger: bytes | memoryview | mmap.mmap, number: int) -> Step | None:
    """Return a step by its number; None if it has not ended, or if a later step has overwritten it."""
    recorded_number, ended_at, *values = STEP.unpack_from(ledger, FIRST_STEP + number % STEPS * STEP.size)
    fields = {field.name: value for field, value in zip(OF_STEPS, values, strict=True)}
    return Step(number, ended_at, fields) if recorded_number == number and ended_at else None


def looked_at(ledger: bytes | memoryview | mmap.mmap) -> int:
    """Return when the groups of backends other than ccl were last copied; 0 if they never were."""
    return int(LOOKED.unpack_from(ledger, LOOKED_AT)[0])


def backends(ledger: bytes | memoryview | mmap.mmap) -> set[str]:
    """Return the backends of all groups, open or closed."""
    places = (FIRST_GROUP + number * GROUP_BYTES for number in range(GROUPS))
    found = (GROUP.unpack_from(ledger, at) for at in places)
    return {name for state, backend, *_ in found if state in (OPEN, CLOSED) and (name := _text(backend))}


def groups(ledger: bytes | memoryview | mmap.mmap, *, closed: bool = False) -> list[Group]:
    """Return the open groups or, with ``closed``, the closed ones."""
    found = []
    for number in range(GROUPS):
        at = FIRST_GROUP + number * GROUP_BYTES
        state, backend, name, size, rank, count, members = GROUP.unpack_from(ledger, at)
        if state == (CLOSED if closed else OPEN):
            first = at + GROUP.size
            records = range(first, first + OPERATIONS * OPERATION.size, OPERATION.size)
            kept = [operation for record in records if (operation := _operation(ledger, record)).state]
            kept.sort(key=lambda operation: operation.enqueued)
            operations = tuple(kept)
            found.append(Group(_text(name), _text(backend), size, rank, count, operations, _text(members)))
    return found


def waits_since(ledger: bytes | memoryview | mmap.mmap) -> int:
    """Return when the oldest pending operation was called; 0 if none is pending."""
    pending = (each for group in groups(ledger) for each in group.operations if each.state in _PENDING)
    return min((each.enqueued for each in pending), default=0)


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
