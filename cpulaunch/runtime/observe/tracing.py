"""Traces steps of this rank by torch's profiler when its agent writes a request to the ledger.

A step lasts from the end of one optimizer step to the end of the next.  In a program that resumes from a
checkpoint, steps are counted from the checkpoint's number.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

from cpulaunch import ledger
from cpulaunch.discovery.host.cgroup import Throttling, cgroup_throttling, share_lost
from cpulaunch.discovery.host.far_memory import far_nodes, far_share
from cpulaunch.discovery.host.files import read_file
from cpulaunch.messages import HasTraced, Traces
from cpulaunch.model.cores import CoreSet
from cpulaunch.runtime import reports
from cpulaunch.runtime.hooks import Change, apply_changes
from cpulaunch.wire import encode

report: Callable[[bytes], object] | None = None
"""Writes a line to this rank's agent; the bootstrap sets it.  None outside of a job."""

METADATA = "cpulaunch"
"""The key of cpulaunch's metadata in the trace file."""

STARTS = ("_prepare_profiler", "_enable_profiler")
"""Functions of torch.autograd.profiler that start a trace."""

MAX_ERROR = 500
"""Maximum characters of a reported exception."""

_SILENT = "6"
"""Value of KINETO_LOG_LEVEL that stops torch's profiler from printing a line at start and stop."""


class Tracer:
    """Makes the traces of this process, one at a time."""

    def __init__(self, torch: Any, memory: Any) -> None:
        self._torch, self._memory = torch, memory
        view = memoryview(memory)
        self._requested = view[ledger.REQUEST_AT : ledger.REQUEST_AT + 8].cast("Q")
        self._steps = view[8:16].cast("Q")  # the header's count
        self._handled = 0  # the number of the last request that is complete or has failed
        self._request = ledger.TraceRequest(0, 0, 0, "")
        self._profiler: Any = None  # None unless a profiler runs
        self._originals: dict[str, Callable[..., Any]] = {}  # functions of torch that are replaced
        self._first = 0  # the first traced step; 0 before the trace begins
        self._borders: list[tuple[int, int]] = []  # number and end of each step
        self._operations = Operations(torch, memory)
        self._migrations = 0
        self._throttling: tuple[int, Throttling | None] = 0, None  # when the trace began
        os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
        os.register_at_fork(after_in_child=self._detach)
        atexit.register(self._close)

    def after_step(self) -> None:
        """Start, continue or end a trace after an optimizer step, which the header has counted."""
        if self._requested[0] != self._handled:
            try:
                self._continue(self._steps[0] + reports.resumed_step)
            except Exception as e:  # the program must not fail because a trace fails
                self._fail(f"{type(e).__name__}: {e}"[:MAX_ERROR])

    def wants_next(self) -> bool:
        """Return whether the profiler will run in the next step."""
        if self._requested[0] == self._handled:
            return False
        request = ledger.trace_request(self._memory)
        step = self._steps[0] + reports.resumed_step + 1
        if not request.first or step < request.first - 1:
            return False
        return not self._first or step <= self._first + request.last - request.first

    def _detach(self) -> None:
        """Detach a forked process from the ledger, which belongs to the rank."""
        self._requested = memoryview(bytes(8)).cast("Q")
        self._handled = 0
        self._profiler = None

    def _close(self) -> None:
        """Stop the profiler at the program's end, because torch would crash if it were still running."""
        with contextlib.suppress(Exception):
            self._stop()

    def _continue(self, completed: int) -> None:
        if self._requested[0] != self._request.number:
            self._stop()
            self._first = 0
            self._request = ledger.trace_request(self._memory)
            if not self._request.first:
                self._handled = self._request.number
                return
        request = self._request
        if self._first:
            self._borders.append((completed, time.monotonic_ns()))
            self._operations.look()
            if completed >= self._first + request.last - request.first:
                self._complete(completed)
            return
        # The profiler's first step is slow, so it starts one step before the first requested step.
        if completed >= request.first - 2 and self._profiler is None:
            self._start()
        if completed >= request.first - 1:
            self._begin(completed)

    def _start(self) -> None:
        apply_changes("torch", [(change, self) for change in CHANGES], self._torch)
        if not self._originals:
            raise RuntimeError("this version of torch lacks a name that cpulaunch needs for traces")
        if self._torch.autograd._profiler_enabled():
            raise RuntimeError("the program uses torch's profiler itself")
        profiler = self._torch.autograd.profiler.profile(use_kineto=True, record_shapes=True)
        profiler._prepare_trace()
        profiler._start_trace()
        self._profiler = profiler

    def _begin(self, completed: int) -> None:
        self._first = completed + 1
        self._migrations = migrations()
        self._operations.begin()
        self._throttling = time.monotonic_ns(), cgroup_throttling(read_file)
        self._borders = [(completed, time.monotonic_ns())]
        self._send(Traces(self._request.number, self._first))

    def _complete(self, last: int) -> None:
        wall = time.time_ns() - time.monotonic_ns()
        cores = CoreSet(os.sched_getaffinity(0))
        metadata = {
            "steps": self._borders,
            "wall": wall,
            "operations": self._operations.calls(wall),
            "migrations": migrations() - self._migrations,
            "throttled": self._throttled(),
            "far_memory": far_share(os.getpid(), far) if (far := far_nodes(cores)) else None,
            "threads": self._torch.get_num_threads(),
        }
        self._torch.autograd._add_metadata_json(METADATA, json.dumps(metadata))
        request, first = self._request, self._first
        profiler = self._stop()
        profiler.kineto_results.save(os.path.join(request.directory, ledger.TRACE_FILE))
        self._end()
        self._send(HasTraced(request.number, first, last, ""))

    def _throttled(self) -> float:
        (began, before), after = self._throttling, cgroup_throttling(read_file)
        lasted = (time.monotonic_ns() - began) / 1e9
        return share_lost(before, after, lasted) if before and after else 0.0

    def _stop(self) -> Any:
        profiler, self._profiler = self._profiler, None
        for name, original in self._originals.items():
            setattr(self._torch.autograd.profiler, name, original)
        self._originals = {}
        if profiler is not None:
            profiler.__exit__(None, None, None)
        return profiler

    def _end(self) -> None:
        self._handled, self._first = self._request.number, 0
        self._operations.clear()

    def _fail(self, why: str) -> None:
        with contextlib.suppress(Exception):
            self._stop()
        number = self._request.number
        self._end()
        self._send(HasTraced(number, 0, 0, why))

    def _send(self, message: Any) -> None:
        if report is not None:
            report(encode(message))

    def replace_starts(self, torch: Any) -> None:
        """End the trace if the program starts torch's profiler, which can run only once at a time."""
        module = torch.autograd.profiler
        self._originals = {name: getattr(module, name) for name in STARTS}
        for name, original in self._originals.items():
            setattr(module, name, self._replacement(original))

    def _replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            if self._profiler is not None:
                self._fail("the program has started torch's profiler itself")
            return original(*args, **kwargs)

        return start


class Operations:
    """The groups and sequence numbers of collectives called during a trace.

    torch's profiler doesn't record them.  They are in the ledger for ccl, and in torch's flight recorder for
    other backends.  Both keep only the latest collectives, so they are read after each step.
    """

    def __init__(self, torch: Any, memory: Any) -> None:
        self._torch, self._memory = torch, memory
        self._began = 0
        self._found: dict[tuple[str, str, int], tuple[str, int, bool]] = {}

    def begin(self) -> None:
        self._began, self._found = time.monotonic_ns(), {}

    def clear(self) -> None:
        self._found = {}

    def look(self) -> None:
        """Add the collectives called since the last step."""
        for group in ledger.groups(self._memory):
            if group.backend == "ccl":
                for each in group.operations:
                    if each.peer < 0 and each.enqueued >= self._began:
                        found = each.kind, each.enqueued, True  # on the monotonic clock
                        self._found["ccl", group.name, each.sequence] = found
        for entry in self._recorded():
            title = entry["profiling_name"]
            if not entry.get("is_p2p"):
                backend, _, kind = title.partition(":")
                key = backend, entry["process_group"][0], entry["collective_seq_id"]
                self._found[key] = kind, entry["time_created_ns"], False  # on the wall clock

    def calls(self, wall: int) -> list[tuple[str, str, int, str, int]]:
        """Return backend, group, sequence number, kind, and time on the monotonic clock of each call."""
        times = (
            (*key, kind, at if monotonic else at - wall) for key, (kind, at, monotonic) in self._found.items()
        )
        return sorted((each for each in times if each[4] >= self._began), key=lambda each: each[4])

    def _recorded(self) -> list[dict[str, Any]]:
        distributed = self._torch.distributed
        world = getattr(getattr(distributed, "distributed_c10d", None), "_world", None)
        dump = getattr(getattr(self._torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
        if world is None or dump is None or all(backend == "ccl" for backend, _ in world.pg_map.values()):
            return []
        entries: list[dict[str, Any]] = json.loads(dump(True, False)).get("entries", [])
        return entries


CHANGES = (
    Change(
        tuple(f"autograd.profiler.{name}" for name in STARTS),
        ("autograd.profiler.profile", "autograd._profiler_enabled", "autograd._add_metadata_json"),
        "only while steps are traced: ends the trace if the script starts torch's profiler itself",
        "no trace can be taken",
        lambda torch, tracer: tracer.replace_starts(torch),
    ),
)


def migrations() -> int:
    """Return how often this process's threads have moved to another CPU; 0 if the kernel doesn't count it."""
    moved = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/sched") as file:
                for line in file:
                    if line.startswith("se.nr_migrations"):
                        moved += int(line.rpartition(":")[2])
                        break
    except (OSError, ValueError):
        return 0
    return moved
