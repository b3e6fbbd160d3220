"""Copies the last operations of groups of backends other than ccl into the rank's ledger, in a thread.

Collectives come from torch's flight recorder, which also records gloo (2.8 and 2.13).  It records neither
messages nor ``monitored_barrier``: both are noted when they are called.  It doesn't say when an operation was
completed: the time when the thread first sees it is used.  The recorder dies with the program, so each
group's last collective is also written to the ledger when it is called; it survives if the program is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from cpulaunch import ledger
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.observe import records
from cpulaunch.runtime.observe.communication import TAKES_OUTPUT_FIRST, Communication
from cpulaunch.runtime.observe.records import Header

INTERVAL = 1.0
"""Minimum seconds between two looks."""

SHARE = 1e-3
"""Maximum share of a core that the thread uses."""

PATIENCE = 0.5
"""Seconds that one look waits for another one to end."""

MOMENT = 0.1
"""Maximum seconds by which the recorder is behind the return of an operation."""

_TYPES = {
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Char": ("int8", 1),
    "Byte": ("uint8", 1), "Bool": ("bool", 1), "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
}  # fmt: skip
"""The recorder's name of a type → torch's name, and bytes."""


OWN = "cpulaunch."
"""Prefix of the descriptions of groups that cpulaunch makes."""

OF_ONE_SIZE = {"allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce"}
"""Methods of a process group whose tensors have one size on all ranks → the ledger's name."""

_KINDS = {
    **OF_ONE_SIZE, "allreduce_coalesced": "all_reduce", "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "gather": "gather", "scatter": "scatter",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all", "barrier": "barrier",
}  # fmt: skip
"""Methods of a process group that are collectives → the ledger's name."""

_UNSET = object()


_Found = tuple[tuple[bool, int], ledger.Operation]
"""Whether an operation is a message, and its number; then the operation."""


class _Message(NamedTuple):
    sequence: int
    kind: str
    tensors: list[Any]  # their types and sizes in bytes
    peer: int
    at: int
    thread: int
    work: Any  # a weak reference


@dataclass
class _Barrier:
    """A ``monitored_barrier`` call; it is over when the call returns."""

    sequence: int
    at: int
    thread: int
    state: int = ledger.STARTED


class _Group:
    """A group's place in the ledger, and its operations so far.

    ``number`` is its ``id`` in Python.  ``counts``: torch counts this group's operations.  It doesn't for a
    group with several backends, such as ``cpu:gloo,cuda:gloo``.
    """

    def __init__(self, name: str, number: int, *, counts: bool) -> None:
        self.name, self.number, self.counts = name, number, counts
        self.take(-1)
        self.collectives = 0  # number called
        self.completed = 0  # number completed
        self.seen: dict[tuple[bool, int], int] = {}  # (is a message, sequence) → when it was found completed
        self.roots: dict[int, int] = {}  # sequence → root
        self.calling: ledger.Operation | None = None  # a call that torch's wrapper may hold back

    def take(self, slot: int) -> None:
        """Use this place in the ledger; -1 means none."""
        self.slot = slot
        self.last_at = ledger.FIRST_GROUP + (slot + 1) * ledger.GROUP_BYTES - ledger.OPERATION.size
        self.word = self.last_at // 8
        self.kind: str | None = None  # of the last record, until it has a root
        self.size, self.dtype, self.thread = 0, None, 0


class _Types(dict[Any, bytes]):
    """dtype → its name in the ledger."""

    def __missing__(self, dtype: Any) -> bytes:
        name = self[dtype] = str(dtype).removeprefix("torch.").encode()
        return name


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(each.nbytes for each in tensors)


class Mirror(threading.Thread):
    """The thread that copies operations.

    ``communication`` learns of calls of ``OF_ONE_SIZE`` from here, as each further wrapper costs a
    microsecond.
    """

    def __init__(
        self, torch: Any, header: Header, memory: Any, communication: Communication | None = None
    ) -> None:
        super().__init__(name="cpulaunch-ledger", daemon=True)
        self._c10d, self._recorder = torch.distributed.distributed_c10d, torch._C._distributed_c10d
        self._header, self._memory = header, memory
        self._words = memoryview(memory).cast("Q")
        self._groups: dict[str, _Group] = {}
        self._numbered: dict[int, _Group] = {}
        self._communication = communication
        self._messages: dict[str, deque[_Message]] = {}
        self._counts: dict[str, int] = {}  # messages by group
        self._barriers: dict[str, deque[_Barrier]] = {}
        self._inside: dict[str, int] = {}  # further messages of barriers, by group
        self._ending = threading.Event()
        self._lock = threading.Lock()  # held while a group's place is made
        self._looking = threading.Lock()
        for name in ("send", "recv", "recv_anysource"):
            self._note_messages(torch.distributed.ProcessGroup, name)
        self._note_barriers(torch.distributed.ProcessGroup)
        for name, kind in OF_ONE_SIZE.items():
            self._note_last(torch.distributed.ProcessGroup, name, kind)
        if torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL:
            for name, kind in _KINDS.items():
                if hasattr(torch.distributed.ProcessGroup, name):
                    self._note_calls(torch.distributed.ProcessGroup, name, kind)
        os.register_at_fork(after_in_child=self._forget)

    def run(self) -> None:
        atexit.register(self._end)
        pause = INTERVAL
        while not self._ending.wait(pause):
            before = time.thread_time()
            try:
                self.look()
            except Exception as e:  # torch doesn't keep the recorder's interface stable
                log_once(
                    f"warning: a stall's report will lack groups other than ccl's: {type(e).__name__}: {e}"
                )
                return
            pause = max(INTERVAL, (time.thread_time() - before) / SHARE)

    def _end(self) -> None:
        """Stop before Python ends, because no thread may call torch after that."""
        self._ending.set()
        self.join(INTERVAL)

    def look(self, *, failed: bool = False) -> None:
        """Copy the recorder's state.  ``failed``: mark each group's last operation as failed."""
        # A caller at the program's end can't wait for long.
        if not self._looking.acquire(timeout=PATIENCE):
            return
        try:
            self._look(failed)
        finally:
            self._looking.release()

    def look_before_end(self) -> None:
        """Look before groups are destroyed: what they completed since the last look would go uncounted."""
        until = time.monotonic() + MOMENT
        with contextlib.suppress(Exception):  # the thread has reported it, or will next time
            self.look()
            while time.monotonic() < until and any(
                each.completed < each.collectives for each in tuple(self._groups.values())
            ):
                time.sleep(MOMENT / 20)
                self.look()

    def _look(self, failed: bool) -> None:
        now = time.monotonic_ns()
        wall = time.time_ns() - now
        recorded = json.loads(self._recorder._dump_fr_trace_json(True, False)).get("entries", ())
        known = set(self._groups)  # before the next line, as the program's thread may make a group
        world = self._c10d._world
        named_by = ((pg, str(backend)) for pg, (backend, _) in dict(world.pg_map).items())
        backends = {pg: backend for pg, backend in named_by if records.is_mirrored(backend)}
        named = {name: pg for pg, name in dict(world.pg_names).items() if pg in backends}
        for name in known - named.keys():
            self._forget_group(name)
        done = 0
        for name, pg in named.items():
            group = self._place(name, pg, backends[pg])
            entries = [each for each in recorded if each["process_group"][0] == name]
            collectives = list(_collectives(entries, wall, group.roots))
            if failed and collectives:
                (key, last) = max(collectives, key=lambda each: each[1].sequence)
                collectives.remove((key, last))
                collectives.append((key, last._replace(state=ledger.FAILED)))
            done += self._copy(name, pg, backends[pg], group, collectives, now)
        if done:
            self._header.add_collectives(done, now)
        ledger.LOOKED.pack_into(self._memory, ledger.LOOKED_AT, now)

    def forget_destroyed(self) -> None:
        """Remove destroyed groups from the ledger before other ranks miss this one."""
        there = set(dict(self._c10d._world.pg_names).values())
        for name in set(self._groups) - there:
            self._forget_group(name)

    def _forget_group(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group:
            self._numbered.pop(group.number, None)
        if group and group.slot >= 0:
            records.clear(self._memory, group.slot)
        kept: tuple[dict[str, Any], ...] = (self._messages, self._barriers, self._counts, self._inside)
        for each in kept:
            each.pop(name, None)

    def _place(self, name: str, pg: Any, backend: str) -> _Group:
        with self._lock:
            group = self._groups.get(name) or _Group(name, id(pg), counts=_counts(pg))
            if group.slot < 0:  # a place may be free by now
                group.take(records.free_slot(self._memory))
                if group.slot >= 0:
                    self._write(group.slot, name, backend, pg, 0, [])
                self._groups[name] = self._numbered[group.number] = group
            return group

    def _copy(self, name: str, pg: Any, backend: str, group: _Group, recorded: list[_Found], now: int) -> int:
        """Write one group.  Returns how many of its operations were completed since the last time."""
        seen, before = {}, group.completed
        operations = []
        collectives = [*recorded, *_barriers(self._barriers.get(name, ()))]
        if (held := group.calling) and all(key != (False, held.sequence) for key, _ in collectives):
            collectives.append(((False, held.sequence), held))
        for key, operation in (*collectives, *_messages(self._messages.get(name, ()))):
            if operation.state == ledger.COMPLETED:
                seen[key] = group.seen.get(key, now)
            operations.append(operation._replace(completed=seen.get(key, 0)))
        done = sum(message for message, _ in seen.keys() - group.seen.keys())
        group.seen = seen
        group.collectives = max([group.collectives, *(sequence + 1 for (_, sequence), _ in collectives)])
        group.completed = max([before, *(sequence + 1 for message, sequence in seen if not message)])
        if group.slot >= 0:
            count = group.collectives + self._counts.get(name, 0)
            self._write(group.slot, name, backend, pg, count, operations)
            group.kind = None
        return done + group.completed - before

    def _write(
        self, slot: int, name: str, backend: str, pg: Any, count: int, operations: list[ledger.Operation]
    ) -> None:
        if pg.group_desc.startswith(OWN):  # not made by the script
            name = f"{name} ({pg.group_desc})"
        group = ledger.Group(name, backend, pg.size(), pg.rank(), count, tuple(operations))
        records.write(self._memory, slot, group)

    def _note_last(self, process_group: Any, method: str, kind: str) -> None:
        """Note each call in the group's last record, where the thread puts the least important operation."""
        original = getattr(process_group, method)
        sequence_of = process_group._get_sequence_number_for_group
        world, in_ledger, watched = self._c10d._world, kind.encode(), self._communication
        # Some 20 calls in a step of 5 ms may take at most 1 % of it, so nothing is looked up twice.  A call
        # that equals the one before writes only its number, and keeps the time of the first such call since a
        # look.
        groups, counts, inside, rooted = self._numbered, self._counts, self._inside, kind != "all_reduce"
        pack, now, started, types = ledger.OPERATION.pack_into, time.monotonic_ns, ledger.STARTED, _Types()
        this_thread, number_of_thread = threading.get_ident, threading.get_native_id

        @functools.wraps(original)
        def call(pg: Any, tensors: Any, opts: Any = _UNSET, *rest: Any, **kwargs: Any) -> Any:
            group = groups.get(id(pg))
            if group is None and records.is_mirrored(backend := world.pg_map.get(pg, ("ccl",))[0]):
                group = self._place(pg.group_name, pg, backend)
            if group is not None:
                tensor = tensors[0] if tensors.__class__ is list else tensors
                size = tensor.nbytes if tensors is tensor or len(tensors) == 1 else _bytes(tensors)
                if watched is not None:
                    watched.pending += 1
                    watched.bytes += size
                    if not watched.since:
                        watched.since = now()
                if group.slot >= 0 and group.counts:
                    number = sequence_of(pg) - (self._others(group.name) if counts or inside else 0)
                    dtype = tensor.dtype
                    thread = this_thread()
                    if (
                        size == group.size
                        and dtype is group.dtype
                        and kind is group.kind
                        and thread == group.thread
                    ):
                        self._words[group.word] = number
                    else:
                        root = _root(opts, kwargs) if rooted else -1
                        if root >= 0:
                            group.roots[number] = root
                        at, type_, time_ = group.last_at, types[dtype], now()
                        fields = in_ledger, type_, size, time_, time_, 0, -1, number_of_thread(), b"", b""
                        pack(self._memory, at, number, started, root + 1, *fields)
                        group.size, group.dtype, group.kind = size, dtype, None if rooted else kind
                        group.thread = thread
            if opts is not _UNSET and not rest and not kwargs:  # torch.distributed calls it like this
                return original(pg, tensors, opts)
            return original(pg, tensors, *(() if opts is _UNSET else (opts, *rest)), **kwargs)

        setattr(process_group, method, call)

    def _note_calls(self, process_group: Any, method: str, kind: str) -> None:
        """Note calls with TORCH_DISTRIBUTED_DEBUG=DETAIL.

        torch's wrapper then calls the group, and so the recorder, only once all ranks have come.
        """
        original = getattr(process_group, method)
        world = self._c10d._world

        @functools.wraps(original)
        def call(pg: Any, *args: Any, **kwargs: Any) -> Any:
            if not records.is_mirrored(backend := world.pg_map.get(pg, ("ccl",))[0]):
                return original(pg, *args, **kwargs)
            group = self._place(pg.group_name, pg, backend)
            now, given = time.monotonic_ns(), _tensors(args[int(method in TAKES_OUTPUT_FIRST) :])
            group.calling = ledger.Operation(
                sequence=self._next(pg, group.name),
                state=ledger.STARTED,
                kind=kind,
                type=str(given[0].dtype).removeprefix("torch.") if given else "",
                bytes=sum(each.nbytes for each in given),
                enqueued=now,
                started=now,
                completed=0,
                peer=-1,
                waits_for="",
                thread=threading.get_native_id(),
            )
            try:
                return original(pg, *args, **kwargs)
            finally:
                group.calling = None

        setattr(process_group, method, call)

    def _next(self, pg: Any, name: str) -> int:
        """Return the recorder's number of the next collective.

        The group's count includes messages; ``monitored_barrier`` counts as two in both.
        """
        if not _counts(pg):
            group = self._groups.get(name)
            return group.collectives if group else 0
        return int(pg._get_sequence_number_for_group()) - self._others(name)

    def _others(self, name: str) -> int:
        """Return how many operations the group has counted that aren't collectives."""
        return self._counts.get(name, 0) + self._inside.get(name, 0)

    def _forget(self) -> None:
        """Detach from the ledger: a forked process shares the rank's memory, but is not the rank."""
        self._memory, self._lock, self._looking = bytearray(ledger.SIZE), threading.Lock(), threading.Lock()
        self._words = memoryview(self._memory).cast("Q")

    def _note_messages(self, process_group: Any, method: str) -> None:
        original = getattr(process_group, method)
        kind = method.partition("_")[0]
        anybodys = kind != method

        @functools.wraps(original)
        def call(pg: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            at = time.monotonic_ns()
            work = original(pg, tensors, *args, **kwargs)
            name = pg.group_name
            number = self._counts.get(name, 0)
            self._counts[name] = number + 1
            if (kept := self._messages.get(name)) is None:
                kept = self._messages[name] = deque(maxlen=ledger.OPERATIONS)
            peer = -1 if anybodys or not args else args[0]
            sizes = [(str(each.dtype)[6:], each.nbytes) for each in tensors]
            thread = threading.get_native_id()
            kept.append(_Message(number, kind, sizes, peer, at, thread, weakref.ref(work)))
            return work

        setattr(process_group, method, call)

    def _note_barriers(self, process_group: Any) -> None:
        original = process_group.monitored_barrier

        @functools.wraps(original)
        def call(pg: Any, *args: Any, **kwargs: Any) -> Any:
            name = pg.group_name
            noted = _Barrier(self._next(pg, name), time.monotonic_ns(), threading.get_native_id())
            self._barriers.setdefault(name, deque(maxlen=ledger.OPERATIONS)).append(noted)
            # Each other rank sends a message to rank 0, and gets one.
            self._inside[name] = self._inside.get(name, 0) + 2 * (pg.size() - 1 if pg.rank() == 0 else 1) - 2
            try:
                result = original(pg, *args, **kwargs)
            except BaseException:
                noted.state = ledger.FAILED
                raise
            noted.state = ledger.COMPLETED
            return result

        process_group.monitored_barrier = call


def _tensors(args: tuple[Any, ...]) -> list[Any]:
    """Return the tensors in the first argument, or the first argument if it is a tensor."""
    waiting, found = list(args[:1]), []
    while waiting:
        each = waiting.pop()
        if isinstance(each, (list, tuple)):
            waiting.extend(each)
        elif hasattr(each, "nbytes"):
            found.append(each)
    return found


def _counts(pg: Any) -> bool:
    try:
        pg._get_sequence_number_for_group()
    except RuntimeError:
        return False
    return True


def _root(opts: Any, kwargs: dict[str, Any]) -> int:
    """Return the root of a broadcast or reduce, as a rank of the group; -1 if it isn't known."""
    said = kwargs.get("root") if opts is _UNSET else opts
    root = getattr(said, "rootRank", said)
    return root if isinstance(root, int) else -1


def _collectives(entries: list[Any], wall: int, roots: dict[int, int]) -> Iterator[_Found]:
    """Yield the recorder's collectives, which it counts from 1; drop ``roots`` of older ones."""
    known = {entry["collective_seq_id"] - 1 for entry in entries}
    threads = {str(each.ident): each.native_id for each in threading.enumerate()}
    for old in [sequence for sequence in roots if sequence < min(known, default=0)]:
        del roots[old]
    for entry in entries:
        sequence = entry["collective_seq_id"] - 1
        types = [_TYPES.get(name, (name.lower(), 0)) for name in entry["input_dtypes"]]
        sizes = (math.prod(shape) for shape in entry["input_sizes"])
        at = entry["time_created_ns"] - wall
        yield (
            (False, sequence),
            ledger.Operation(
                sequence=sequence,
                state=ledger.COMPLETED if entry["retired"] else ledger.STARTED,
                kind=entry["profiling_name"].partition(":")[2],
                type=types[0][0] if types else "",
                bytes=sum(bytes_ * size for (_, bytes_), size in zip(types, sizes, strict=False)),
                enqueued=at,
                started=at,
                completed=0,
                peer=-1,
                waits_for="",
                root=roots.get(sequence, -1),
                thread=threads.get(entry.get("thread_id", "")) or 0,  # torch 2.8 doesn't report it
            ),
        )


def _barriers(barriers: Iterable[_Barrier]) -> Iterator[_Found]:
    for each in tuple(barriers):
        times = each.at, each.at, 0
        operation = ledger.Operation(
            each.sequence, each.state, "monitored_barrier", "", 0, *times, -1, "", thread=each.thread
        )
        yield (False, each.sequence), operation


def _messages(messages: Iterable[_Message]) -> Iterator[_Found]:
    for message in tuple(messages):
        work = message.work()
        # A work object that is gone has no waiters left.
        state = ledger.COMPLETED if work is None or work.is_completed() else ledger.STARTED
        yield (
            (True, message.sequence),
            ledger.Operation(
                sequence=message.sequence,
                state=state,
                kind=message.kind,
                type=message.tensors[0][0] if message.tensors else "",
                bytes=sum(size for _, size in message.tensors),
                enqueued=message.at,
                started=message.at,
                completed=0,
                peer=message.peer,
                waits_for="",
                thread=message.thread,
            ),
        )
