"""Measures the communication of groups of backends other than ccl: duration, waiting, and bytes.

The times come from wrappers of ``Work.wait``, and from the timer of DistributedDataParallel.
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
"""Methods of a process group whose first argument is the output, and the second this rank's input."""

CALLS = (
    *TAKES_OUTPUT_FIRST,
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "send", "recv", "recv_anysource", "barrier",
)  # fmt: skip
"""All methods of a process group that start an operation."""


class Communication:
    """Sums over all completed operations of the program, in nanoseconds and bytes.

    ``busy``: time with at least one operation under way.  ``waiting``: time in ``Work.wait``, or in DDP after
    the last gradient.  ``pending``: the number of operations that were called and not yet waited for.
    ``since``: when the time that is not yet added to ``busy`` began; 0 if nothing is pending.
    """

    def __init__(self, torch: Any) -> None:
        self.busy = self.waiting = self.bytes = 0
        self._parallel: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.pending = self.since = 0
        self._tensor = torch.Tensor

    def watch_calls(self, process_group: Any, but: Collection[str] = ()) -> None:
        """Wrap the methods of ``process_group`` in CALLS, except ``but``, which the mirror counts."""
        for name in CALLS:
            if name not in but:
                self._watch_call(process_group, name, int(name in TAKES_OUTPUT_FIRST))

    def end_step(self) -> None:
        """Add the times of DistributedDataParallel at the end of an optimizer step."""
        self.pending = self.since = 0
        try:
            self._add_parallel()
        except Exception as e:  # the timer's interface isn't stable
            self._parallel.clear()
            log_once(f"waiting in DistributedDataParallel can't be measured: {type(e).__name__}: {e}")

    def _add_parallel(self) -> None:
        for parallel, before in tuple(self._parallel.items()):
            logger = parallel.logger
            logger.set_runtime_stats_and_log()
            data = logger._get_ddp_logging_data()
            found = data.ints_map
            ended = found.get("backward_comm_time_end", 0)
            if ended == before:
                continue  # a step with no_sync, which accumulates gradients
            self._parallel[parallel] = ended
            took = found["backward_comm_time"]
            self.busy += took
            self.waiting += max(0, took - found["backward_compute_comm_overlap_time"])
            if "comm_hook" not in data.strs_map:  # the operations that a hook calls are counted already
                self.bytes += found["total_parameter_size_bytes"]

    def _watch_call(self, process_group: Any, name: str, position: int) -> None:
        original = getattr(process_group, name)
        now = time.monotonic_ns

        @functools.wraps(original)
        def call(pg: Any, *args: Any, **kwargs: Any) -> Any:
            self.pending += 1
            if not self.since:
                self.since = now()
            if len(args) > position:
                self.bytes += self._bytes(args[position])
            return original(pg, *args, **kwargs)

        setattr(process_group, name, call)

    def _bytes(self, argument: Any) -> int:
        if argument.__class__ is list and len(argument) == 1:  # fast path for all_reduce
            argument = argument[0]
        if isinstance(argument, self._tensor):
            return int(argument.nbytes)
        return sum(map(self._bytes, argument)) if isinstance(argument, (list, tuple)) else 0

    def watch_waits(self, work: Any) -> None:
        """Measure how long the program waits in ``work.wait``, after which the operation is completed."""
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
        """Make each DistributedDataParallel time every step; by default, it times one step in a hundred."""
        original = parallel.__init__

        @functools.wraps(original)
        def init(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if hasattr(module, "logger") and hasattr(module, "_set_ddp_runtime_logging_sample_rate"):
                module._set_ddp_runtime_logging_sample_rate(1)
                self._parallel[module] = 0

        parallel.__init__ = init
