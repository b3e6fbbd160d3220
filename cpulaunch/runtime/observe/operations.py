"""Operations of groups of backends other than ccl, as the ledger describes them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from cpulaunch import ledger

_TYPES = {
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Char": ("int8", 1),
    "Byte": ("uint8", 1), "Bool": ("bool", 1), "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
}  # fmt: skip
"""The flight recorder's name of a type → torch's name, and its size in bytes."""

Keyed = tuple[tuple[bool, int], ledger.Operation]
"""An operation and its key in its group: whether it is a message, and its sequence number."""


class Message(NamedTuple):
    """A call of ``send`` or ``recv``.

    ``tensors``: type and size in bytes of each tensor.  ``work``: a weak reference to the work object.
    """

    sequence: int
    kind: str
    tensors: list[tuple[str, int]]
    peer: int
    at: int
    thread: int
    work: Any


@dataclass
class Barrier:
    """A call of ``monitored_barrier``, which is complete when it returns."""

    sequence: int
    at: int
    thread: int
    state: int = ledger.STARTED


def started_operation(sequence: int, kind: str, at: int, thread: int) -> ledger.Operation:
    """Return an operation without tensors that ``thread`` called at the time ``at``."""
    return ledger.Operation(sequence, ledger.STARTED, kind, "", 0, at, at, 0, -1, "", thread=thread)


def recorded_collectives(entries: list[Any], wall: int, roots: dict[int, int]) -> Iterator[Keyed]:
    """Yield the collectives in the flight recorder's ``entries``.

    ``wall`` is the wall clock minus the monotonic clock.  ``roots`` maps sequence numbers to roots; roots of
    collectives that the recorder has dropped are removed.
    """
    # The recorder counts from 1, the ledger from 0.
    numbers = {entry["collective_seq_id"] - 1 for entry in entries}
    threads = {str(each.ident): each.native_id for each in threading.enumerate()}
    for old in [sequence for sequence in roots if sequence < min(numbers, default=0)]:
        del roots[old]
    for entry in entries:
        sequence = entry["collective_seq_id"] - 1
        types = [_TYPES.get(name, (name.lower(), 0)) for name in entry["input_dtypes"]]
        sizes = (math.prod(shape) for shape in entry["input_sizes"])
        operation = started_operation(
            sequence,
            entry["profiling_name"].partition(":")[2],
            entry["time_created_ns"] - wall,
            threads.get(entry.get("thread_id", "")) or 0,  # torch 2.8 doesn't record the thread
        )
        yield (
            (False, sequence),
            operation._replace(
                state=ledger.COMPLETED if entry["retired"] else ledger.STARTED,
                type=types[0][0] if types else "",
                bytes=sum(bytes_ * size for (_, bytes_), size in zip(types, sizes, strict=False)),
                root=roots.get(sequence, -1),
            ),
        )


def barriers(calls: Iterable[Barrier]) -> Iterator[Keyed]:
    """Yield the operations of ``monitored_barrier`` calls."""
    for call in tuple(calls):
        operation = started_operation(call.sequence, "monitored_barrier", call.at, call.thread)
        yield (False, call.sequence), operation._replace(state=call.state)


def messages(calls: Iterable[Message]) -> Iterator[Keyed]:
    """Yield the operations of ``send`` and ``recv`` calls."""
    for call in tuple(calls):
        work = call.work()
        # If the work object was freed, nothing can wait for it, so the operation counts as completed.
        completed = work is None or work.is_completed()
        yield (
            (True, call.sequence),
            started_operation(call.sequence, call.kind, call.at, call.thread)._replace(
                state=ledger.COMPLETED if completed else ledger.STARTED,
                type=call.tensors[0][0] if call.tensors else "",
                bytes=sum(size for _, size in call.tensors),
                peer=call.peer,
            ),
        )
