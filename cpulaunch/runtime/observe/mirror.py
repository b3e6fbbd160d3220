"""Copies the last operations of groups of backends other than ccl into the rank's ledger, in a thread.

torch's flight recorder records the collectives of gloo (2.8 and 2.13), but neither messages nor
``monitored_barrier``, so wrappers record these calls.  The recorder has no completion time; the time at which
the thread first finds the operation completed is used.  When a program is killed, the recorder is lost, so a
wrapper also writes each group's last collective to the ledger when it is called.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import threading
import time
import weakref
from collections import deque
from typing import Any

from cpulaunch import ledger
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.observe import operations, records
from cpulaunch.runtime.observe.communication import TAKES_OUTPUT_FIRST, Communication
from cpulaunch.runtime.observe.operations import Barrier, Keyed, Message
from cpulaunch.runtime.observe.records import Header

INTERVAL = 1.0
"""Minimum seconds between two copies."""

SHARE = 1e-3
"""Maximum share of a core's time that the thread uses."""

PATIENCE = 0.5
"""Maximum seconds to wait for a copy in another thread to end."""

RECORDER_DELAY = 0.1
"""Maximum seconds between the return of an operation and its completion in the recorder."""

OWN = "cpulaunch."
"""Prefix of the descriptions of groups that cpulaunch makes."""

SAME_SIZE = {"allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce"}
"""Methods of a process group whose tensors have the same size on all ranks → the ledger's name."""

_KINDS = {
    **SAME_SIZE, "allreduce_coalesced": "all_reduce", "allgather": "all_gather",
    "_allgather_base": "all_gather", "allgather_into_tensor_coalesced": "all_gather",
    "gather": "gather", "scatter": "scatter",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all", "barrier": "barrier",
}  # fmt: skip
"""Methods of a process group that are collectives → the ledger's name."""

_UNSET = object()


class _Group:
    """A group's slot in the ledger, and its operations.

    ``number`` is the ``id`` of the Python object.  ``has_numbers``: torch numbers the group's operations,
    which it doesn't do for a group with several backends, such as ``cpu:gloo,cuda:gloo``.
    """

    def __init__(self, name: str, number: int, *, has_numbers: bool) -> None:
        self.name, self.number, self.has_numbers = name, number, has_numbers
        self.use_slot(-1)
        self.collectives = 0  # number of calls
        self.completed = 0  # number of completed collectives
        self.completed_at: dict[tuple[bool, int], int] = {}  # key → when it was first found completed
        self.roots: dict[int, int] = {}  # sequence → root
        self.calling: ledger.Operation | None = None  # a call that torch's debugging wrapper may delay

    def use_slot(self, slot: int) -> None:
        """Use this slot of the ledger; -1 means none."""
        self.slot = slot
        self.last_at = ledger.FIRST_GROUP + (slot + 1) * ledger.GROUP_BYTES - ledger.OPERATION.size
        self.word = self.last_at // 8
        # The last call in the slot's last record; its kind is None if the record can't be reused.
        self.kind: str | None = None
        self.size, self.dtype, self.thread = 0, None, 0


class _Types(dict[Any, bytes]):
    """dtype → its name in the ledger."""

    def __missing__(self, dtype: Any) -> bytes:
        name = self[dtype] = str(dtype).removeprefix("torch.").encode()
        return name


class Mirror(threading.Thread):
    """The thread that copies operations.

    It also counts calls of SAME_SIZE in ``communication``, because a second wrapper would cost a microsecond
    per call.
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
        self._messages: dict[str, deque[Message]] = {}
        self._message_counts: dict[str, int] = {}  # group → number of messages
        self._barriers: dict[str, deque[Barrier]] = {}
        self._barrier_messages: dict[str, int] = {}  # group → messages of barriers, less 2 per barrier
        self._ending = threading.Event()
        self._lock = threading.Lock()  # held while a group gets its slot
        self._copying = threading.Lock()
        process_group = torch.distributed.ProcessGroup
        for name in ("send", "recv", "recv_anysource"):
            self._record_messages(process_group, name)
        self._record_barriers(process_group)
        for name, kind in SAME_SIZE.items():
            self._record_last(process_group, name, kind)
        if torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL:
            for name, kind in _KINDS.items():
                if hasattr(process_group, name):
                    self._record_delayed(process_group, name, kind)
        os.register_at_fork(after_in_child=self._detach)

    def run(self) -> None:
        atexit.register(self._end)
        pause = INTERVAL
        while not self._ending.wait(pause):
            before = time.thread_time()
            try:
                self.look()
            except Exception as e:  # the recorder's interface isn't stable
                log_once(
                    f"warning: a stall's report will lack groups other than ccl's: {type(e).__name__}: {e}"
                )
                return
            pause = max(INTERVAL, (time.thread_time() - before) / SHARE)

    def _end(self) -> None:
        """Stop the thread, because it must not call torch when the interpreter has shut down."""
        self._ending.set()
        self.join(INTERVAL)

    def look(self, *, failed: bool = False) -> None:
        """Copy all operations now.  ``failed``: mark each group's last collective as failed."""
        if not self._copying.acquire(timeout=PATIENCE):
            return
        try:
            self._look(failed)
        finally:
            self._copying.release()

    def look_before_end(self) -> None:
        """Copy operations before groups are destroyed, so that all completed ones are counted."""
        until = time.monotonic() + RECORDER_DELAY
        with contextlib.suppress(Exception):  # `run` reports the exception
            self.look()
            while time.monotonic() < until and any(
                each.completed < each.collectives for each in tuple(self._groups.values())
            ):
                time.sleep(RECORDER_DELAY / 20)
                self.look()

    def _look(self, failed: bool) -> None:
        now = time.monotonic_ns()
        wall = time.time_ns() - now
        recorded = json.loads(self._recorder._dump_fr_trace_json(True, False)).get("entries", ())
        known = set(self._groups)  # read before torch's table: other threads may add groups to both
        world = self._c10d._world
        all_backends = ((pg, str(backend)) for pg, (backend, _) in dict(world.pg_map).items())
        backends = {pg: backend for pg, backend in all_backends if records.is_mirrored(backend)}
        groups = {name: pg for pg, name in dict(world.pg_names).items() if pg in backends}
        for name in known - groups.keys():
            self._remove(name)
        completed = 0
        for name, pg in groups.items():
            group = self._group(name, pg, backends[pg])
            entries = [each for each in recorded if each["process_group"][0] == name]
            collectives = list(operations.recorded_collectives(entries, wall, group.roots))
            if failed and collectives:
                (key, last) = max(collectives, key=lambda each: each[1].sequence)
                collectives.remove((key, last))
                collectives.append((key, last._replace(state=ledger.FAILED)))
            completed += self._copy(pg, backends[pg], group, collectives, now)
        if completed:
            self._header.add_collectives(completed, now)
        ledger.LOOKED.pack_into(self._memory, ledger.LOOKED_AT, now)

    def forget_destroyed(self) -> None:
        """Remove destroyed groups from the ledger, so that no rank is reported as late in them."""
        existing = set(dict(self._c10d._world.pg_names).values())
        for name in set(self._groups) - existing:
            self._remove(name)

    def _remove(self, name: str) -> None:
        if group := self._groups.pop(name, None):
            self._numbered.pop(group.number, None)
            if group.slot >= 0:
                records.clear(self._memory, group.slot)
        self._messages.pop(name, None)
        self._barriers.pop(name, None)
        self._message_counts.pop(name, None)
        self._barrier_messages.pop(name, None)

    def _group(self, name: str, pg: Any, backend: str) -> _Group:
        """Return the group of this name; if it has no slot yet, look for a free one."""
        with self._lock:
            group = self._groups.get(name) or _Group(name, id(pg), has_numbers=_has_numbers(pg))
            if group.slot < 0:
                group.use_slot(records.free_slot(self._memory))
                if group.slot >= 0:
                    self._write(group, backend, pg, 0, [])
                self._groups[name] = self._numbered[group.number] = group
            return group

    def _copy(self, pg: Any, backend: str, group: _Group, recorded: list[Keyed], now: int) -> int:
        """Write one group.  Returns how many of its operations were completed since the last copy."""
        completed_at, before = {}, group.completed
        copied = []
        collectives = [*recorded, *operations.barriers(self._barriers.get(group.name, ()))]
        if (delayed := group.calling) and all(key != (False, delayed.sequence) for key, _ in collectives):
            collectives.append(((False, delayed.sequence), delayed))
        for key, operation in (*collectives, *operations.messages(self._messages.get(group.name, ()))):
            if operation.state == ledger.COMPLETED:
                completed_at[key] = group.completed_at.get(key, now)
            copied.append(operation._replace(completed=completed_at.get(key, 0)))
        messages = sum(is_message for is_message, _ in completed_at.keys() - group.completed_at.keys())
        group.completed_at = completed_at
        group.collectives = max([group.collectives, *(sequence + 1 for (_, sequence), _ in collectives)])
        group.completed = max(
            [before, *(number + 1 for is_message, number in completed_at if not is_message)]
        )
        if group.slot >= 0:
            count = group.collectives + self._message_counts.get(group.name, 0)
            self._write(group, backend, pg, count, copied)
            group.kind = None
        return messages + group.completed - before

    def _write(
        self, group: _Group, backend: str, pg: Any, count: int, copied: list[ledger.Operation]
    ) -> None:
        name = f"{group.name} ({pg.group_desc})" if pg.group_desc.startswith(OWN) else group.name
        written = ledger.Group(name, backend, pg.size(), pg.rank(), count, tuple(copied))
        records.write(self._memory, group.slot, written)

    def _record_last(self, process_group: Any, method: str, kind: str) -> None:
        """Write each call to the group's last record, which a copy overwrites last."""
        original = getattr(process_group, method)
        sequence_of = process_group._get_sequence_number_for_group
        world, in_ledger, communication = self._c10d._world, kind.encode(), self._communication
        # This wrapper must be fast: 20 calls in a step of 5 ms may cost 1 % of it.  So attributes are local
        # variables.  A call that equals the previous call only replaces the number in the record; the record
        # keeps the time of the first such call since the last copy.
        groups, rooted = self._numbered, kind != "all_reduce"
        messages, barriers = self._message_counts, self._barrier_messages
        pack, now, started, types = ledger.OPERATION.pack_into, time.monotonic_ns, ledger.STARTED, _Types()
        this_thread, number_of_thread = threading.get_ident, threading.get_native_id

        @functools.wraps(original)
        def call(pg: Any, tensors: Any, opts: Any = _UNSET, *rest: Any, **kwargs: Any) -> Any:
            group = groups.get(id(pg))
            if group is None and records.is_mirrored(backend := world.pg_map.get(pg, ("ccl",))[0]):
                group = self._group(pg.group_name, pg, backend)
            if group is not None:
                tensor = tensors[0] if tensors.__class__ is list else tensors
                one = tensors is tensor or len(tensors) == 1
                try:
                    size = tensor.nbytes if one else sum(each.nbytes for each in tensors)
                except RuntimeError:  # sparse tensors
                    size = 0
                if communication is not None:
                    communication.pending += 1
                    communication.bytes += size
                    if not communication.since:
                        communication.since = now()
                if group.slot >= 0 and group.has_numbers:
                    number = sequence_of(pg) - (self._others(group.name) if messages or barriers else 0)
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
            if opts is not _UNSET and not rest and not kwargs:  # a shortcut for calls by torch.distributed
                return original(pg, tensors, opts)
            return original(pg, tensors, *(() if opts is _UNSET else (opts, *rest)), **kwargs)

        setattr(process_group, method, call)

    def _record_delayed(self, process_group: Any, method: str, kind: str) -> None:
        """Record calls with TORCH_DISTRIBUTED_DEBUG=DETAIL.

        torch's debugging wrapper calls the group, and so the recorder, only after all ranks have called it.
        """
        original = getattr(process_group, method)
        world = self._c10d._world

        @functools.wraps(original)
        def call(pg: Any, *args: Any, **kwargs: Any) -> Any:
            if not records.is_mirrored(backend := world.pg_map.get(pg, ("ccl",))[0]):
                return original(pg, *args, **kwargs)
            group = self._group(pg.group_name, pg, backend)
            now, inputs = time.monotonic_ns(), _tensors(args[int(method in TAKES_OUTPUT_FIRST) :])
            group.calling = operations.started_operation(
                self._next(pg, group.name), kind, now, threading.get_native_id()
            )._replace(
                type=str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
                bytes=sum(each.nbytes for each in inputs),
            )
            try:
                return original(pg, *args, **kwargs)
            finally:
                group.calling = None

        setattr(process_group, method, call)

    def _next(self, pg: Any, name: str) -> int:
        """Return the sequence number of the group's next collective."""
        if not _has_numbers(pg):
            group = self._groups.get(name)
            return group.collectives if group else 0
        return int(pg._get_sequence_number_for_group()) - self._others(name)

    def _others(self, name: str) -> int:
        """Return how many messages, and parts of ``monitored_barrier``, torch has counted as operations."""
        return self._message_counts.get(name, 0) + self._barrier_messages.get(name, 0)

    def _detach(self) -> None:
        """Detach a forked process from the ledger, which belongs to the rank."""
        self._memory, self._lock, self._copying = bytearray(ledger.SIZE), threading.Lock(), threading.Lock()
        self._words = memoryview(self._memory).cast("Q")

    def _record_messages(self, process_group: Any, method: str) -> None:
        original = getattr(process_group, method)
        kind = method.partition("_")[0]
        from_any = kind != method

        @functools.wraps(original)
        def call(pg: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            at = time.monotonic_ns()
            work = original(pg, tensors, *args, **kwargs)
            name = pg.group_name
            number = self._message_counts.get(name, 0)
            self._message_counts[name] = number + 1
            if (messages := self._messages.get(name)) is None:
                messages = self._messages[name] = deque(maxlen=ledger.OPERATIONS)
            peer = -1 if from_any or not args else args[0]
            sizes = [(str(each.dtype)[6:], each.nbytes) for each in tensors]
            thread = threading.get_native_id()
            messages.append(Message(number, kind, sizes, peer, at, thread, weakref.ref(work)))
            return work

        setattr(process_group, method, call)

    def _record_barriers(self, process_group: Any) -> None:
        original = process_group.monitored_barrier

        @functools.wraps(original)
        def call(pg: Any, *args: Any, **kwargs: Any) -> Any:
            name = pg.group_name
            barrier = Barrier(self._next(pg, name), time.monotonic_ns(), threading.get_native_id())
            self._barriers.setdefault(name, deque(maxlen=ledger.OPERATIONS)).append(barrier)
            # Rank 0 receives a message from each other rank and answers it.  torch counts these messages, and
            # the recorder's numbers advance by two.
            messages = 2 * (pg.size() - 1 if pg.rank() == 0 else 1)
            self._barrier_messages[name] = self._barrier_messages.get(name, 0) + messages - 2
            try:
                result = original(pg, *args, **kwargs)
            except BaseException:
                barrier.state = ledger.FAILED
                raise
            barrier.state = ledger.COMPLETED
            return result

        process_group.monitored_barrier = call


def _tensors(args: tuple[Any, ...]) -> list[Any]:
    """Return the tensors in the first argument: a tensor, or nested lists of tensors."""
    left, found = list(args[:1]), []
    while left:
        each = left.pop()
        if isinstance(each, (list, tuple)):
            left.extend(each)
        elif hasattr(each, "nbytes"):
            found.append(each)
    return found


def _has_numbers(pg: Any) -> bool:
    try:
        pg._get_sequence_number_for_group()
    except RuntimeError:
        return False
    return True


def _root(opts: Any, kwargs: dict[str, Any]) -> int:
    """Return the root of a broadcast or reduce, as a rank of the group; -1 if it is unknown."""
    argument = kwargs.get("root") if opts is _UNSET else opts
    root = getattr(argument, "rootRank", argument)
    return root if isinstance(root, int) else -1
