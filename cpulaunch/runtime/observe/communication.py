"""Communication per step in groups of backends other than ccl: time under way, waiting, bytes.

ccl counts its own.  Two places are watched, as both know when an operation is over.  One is where the program
waits for it (``Work.wait``).  The other is DistributedDataParallel, whose timer says when its first bucket
was handed over, when the last gradient was computed, and when the last bucket was reduced.  This needs no
thread and no system call.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Collection
from typing import Any

from cpulaunch.runtime.log import log_once

TAKES_OUTPUT_FIRST = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter", "alltoall",
    "alltoall_base",
)  # fmt: skip
"""Methods of a process group that take the output first, and this rank's input second."""

CALLS = (
    *TAKES_OUTPUT_FIRST,
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "send", "recv", "recv_anysource", "barrier",
)  # fmt: skip
"""All methods of a process group that start an operation."""


class Communication:
    """Sums since the program's start, in nanoseconds and bytes; an operation is added when it is over.

    ``pending`` is the number of operations that were called and not yet waited for.  ``since`` is when the
    first of them was called, or when the operation before that was over.
    """

    def __init__(self, torch: Any) -> None:
        self.busy = self.waiting = self.bytes = 0
        self._parallel: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.pending = self.since = 0
        self._tensor = torch.Tensor

    def watch_calls(self, process_group: Any, but: Collection[str] = ()) -> None:
        """Count the input of a class of groups, except in methods (``but``) that the mirror counts."""
        for name in CALLS:
            if name not in but:
                self._watch_calls(process_group, name, int(name in TAKES_OUTPUT_FIRST))

    def stepped(self) -> None:
        """Add DistributedDataParallel's times at the end of an optimizer step, and begin anew."""
        self.pending = self.since = 0
        try:
            self._add_parallel()
        except Exception as e:  # torch doesn't keep the timer's interface stable
            self._parallel.clear()
            log_once(f"waiting in DistributedDataParallel can't be seen: {type(e).__name__}: {e}")

    def _add_parallel(self) -> None:
        for parallel, before in tuple(self._parallel.items()):
            logger = parallel.logger
            logger.set_runtime_stats_and_log()
            data = logger._get_ddp_logging_data()
            found = data.ints_map
            ended = found.get("backward_comm_time_end", 0)
            if ended == before:
                continue  # it has only accumulated gradients
            self._parallel[parallel] = ended
            took = found["backward_comm_time"]
            self.busy += took
            self.waiting += max(0, took - found["backward_compute_comm_overlap_time"])
            if "comm_hook" not in data.strs_map:  # a hook calls operations that are watched already
                self.bytes += found["total_parameter_size_bytes"]

    def _watch_calls(self, process_group: Any, name: str, gives: int) -> None:
        original = getattr(process_group, name)
        now = time.monotonic_ns

        @functools.wraps(original)
        def call(pg: Any, *args: Any, **kwargs: Any) -> Any:
            self.pending += 1
            if not self.since:
                self.since = now()
            if len(args) > gives:
                self.bytes += self._bytes(args[gives])
            return original(pg, *args, **kwargs)

        setattr(process_group, name, call)

    def _bytes(self, given: Any) -> int:
        if given.__class__ is list and len(given) == 1:  # fast path for all_reduce
            given = given[0]
        if isinstance(given, self._tensor):
            return int(given.nbytes)
        return sum(map(self._bytes, given)) if isinstance(given, (list, tuple)) else 0

    def watch_waits(self, work: Any) -> None:
        """Measure how long the program waits for operations; they are over after that."""
        original = work.wait
        now = time.monotonic_ns

        @functools.wraps(original)
        def wait(self_: Any, *args: Any, **kwargs: Any) -> Any:
            began = now()
            try:
                return original(self_, *args, **kwargs)
            finally:
                ended = now()
                self.waiting += ended - began
                self.busy += ended - (self.since or began)
                self.pending = max(0, self.pending - 1)
                self.since = ended if self.pending else 0

        work.wait = wait

    def watch_parallel(self, parallel: Any) -> None:
        """Have each DistributedDataParallel time every step."""
        original = parallel.__init__

        @functools.wraps(original)
        def init(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if hasattr(module, "logger") and hasattr(module, "_set_ddp_runtime_logging_sample_rate"):
                module._set_ddp_runtime_logging_sample_rate(1)
                self._parallel[module] = 0

        parallel.__init__ = init
