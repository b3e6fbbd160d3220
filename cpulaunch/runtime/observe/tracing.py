"""Traces steps of this rank by torch's profiler when its agent asks for it through the ledger.

A step lasts from the end of one optimizer step to the end of the next.  Steps have the job's numbers: a
program that resumes from a saved state counts on from there.  Without a request, a step costs a comparison of
two numbers.
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
"""Writes a line to this rank's agent; the bootstrap sets it when this module is loaded."""

METADATA = "cpulaunch"
"""The key in the trace file for facts that torch doesn't know."""

STARTS = ("_prepare_profiler", "_enable_profiler")
"""Functions of torch.autograd.profiler that start a trace."""

MAX_ERROR = 500
"""Maximum characters of an exception that are reported."""

_SILENT = "6"
"""Value of KINETO_LOG_LEVEL that stops torch's profiler from printing a line at start and stop."""


def watch(torch: Any, memory: Any) -> Tracer:
    """Return a tracer for this process; the caller calls its ``after_step`` after each step."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    tracer = Tracer(torch, memory)
    os.register_at_fork(after_in_child=tracer.forget)
    atexit.register(tracer.close)
    return tracer


class Tracer:
    """The traces of this process, one at a time."""

    def __init__(self, torch: Any, memory: Any) -> None:
        self._torch, self._memory = torch, memory
        view = memoryview(memory)
        self._asked = view[ledger.REQUEST_AT : ledger.REQUEST_AT + 8].cast("Q")
        self._steps = view[8:16].cast("Q")  # of the header
        self._done = 0  # the last request that is complete
        self._request = ledger.TraceRequest(0, 0, 0, "")
        self._profiler: Any = None  # set while it runs
        self._originals: dict[str, Callable[..., Any]] = {}  # replaced functions of torch
        self._first = 0  # the first step traced, once tracing
        self._borders: list[tuple[int, int]] = []  # (completed steps, time)
        self._operations = Operations(torch, memory)
        self._migrations = 0
        self._held_back: tuple[int, Throttling | None] = 0, None

    def after_step(self) -> None:
        """Start, continue or end a trace after an optimizer step, which the header has counted."""
        if self._asked[0] != self._done:
            try:
                self._go_on(self._steps[0] + reports.resumed_step)
            except Exception as e:  # no reason for the program to fail
                self._fail(f"{type(e).__name__}: {e}"[:MAX_ERROR])

    def wants_next(self) -> bool:
        """Return whether the next step is to be traced, or precedes the first one to be traced."""
        if self._asked[0] == self._done:
            return False
        request = ledger.trace_request(self._memory)
        step = self._steps[0] + reports.resumed_step + 1
        if not request.first or step < request.first - 1:
            return False
        return not self._first or step <= self._first + request.last - request.first

    def forget(self) -> None:
        """Detach from the ledger after a fork: a forked process is not the rank."""
        self._asked = memoryview(bytes(8)).cast("Q")
        self._done = 0
        self._profiler = None

    def close(self) -> None:
        """Stop the profiler at the program's end; torch's libraries would crash on unloading with it on."""
        with contextlib.suppress(Exception):
            self._stop()

    def _go_on(self, completed: int) -> None:
        if self._asked[0] != self._request.number:
            self._stop()
            self._first = 0
            self._request = ledger.trace_request(self._memory)
            if not self._request.first:
                self._done = self._request.number
                return
        request = self._request
        if self._first:
            self._note(completed)
            if completed >= self._first + request.last - request.first:
                self._complete(completed)
            return
        # The profiler slows its first step, so it starts one step before those requested.
        if completed >= request.first - 2 and self._profiler is None:
            self._start()
        if completed >= request.first - 1:
            self._begin(completed)

    def _start(self) -> None:
        apply_changes("torch", [(change, self) for change in CHANGES], self._torch)
        if not self._originals:
            raise RuntimeError("this torch lacks a name that cpulaunch needs for that")
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
        self._held_back = time.monotonic_ns(), cgroup_throttling(read_file)
        self._borders = [(completed, time.monotonic_ns())]
        self._say(Traces(self._request.number, self._first))

    def _note(self, completed: int) -> None:
        self._borders.append((completed, time.monotonic_ns()))
        self._operations.look()

    def _complete(self, last: int) -> None:
        # A rank that was late traces as many steps as the others.
        wall = time.time_ns() - time.monotonic_ns()
        about = {
            "steps": self._borders,
            "wall": wall,
            "operations": self._operations.seen(wall),
            "migrations": migrations() - self._migrations,
            "throttled": self._throttled(),
            "far_memory": far_share(os.getpid(), far) if (far := far_nodes(_cores())) else None,
            "threads": self._torch.get_num_threads(),
        }
        self._torch.autograd._add_metadata_json(METADATA, json.dumps(about))
        request, first = self._request, self._first
        profiler = self._stop()
        profiler.kineto_results.save(os.path.join(request.directory, ledger.TRACE_FILE))
        self._end()
        self._say(HasTraced(request.number, first, last, ""))

    def _throttled(self) -> float:
        (began, before), after = self._held_back, cgroup_throttling(read_file)
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
        self._done, self._first = self._request.number, 0
        self._operations.forget()

    def _fail(self, why: str) -> None:
        with contextlib.suppress(Exception):
            self._stop()
        number = self._request.number
        self._end()
        self._say(HasTraced(number, 0, 0, why))

    def _say(self, message: Any) -> None:
        if report is not None:
            report(encode(message))

    # ---- the program's own use of the profiler

    def give_way(self, torch: Any) -> None:
        """Stop when the program starts a trace of its own: there can be only one at a time."""
        module = torch.autograd.profiler
        self._originals = {name: getattr(module, name) for name in STARTS}
        for name, original in self._originals.items():
            setattr(module, name, self._giving_way(original))

    def _giving_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            if self._profiler is not None:
                self._fail("the program has started torch's profiler itself")
            return original(*args, **kwargs)

        return start


class Operations:
    """The groups and numbers of collectives called during a trace, which torch's profiler doesn't record.

    ccl's are in the ledger, those of other backends in torch's flight recorder.  Both keep only the last
    ones, so they are read after each step.
    """

    def __init__(self, torch: Any, memory: Any) -> None:
        self._torch, self._memory = torch, memory
        self._began = 0
        self._found: dict[tuple[str, str, int], tuple[str, int, bool]] = {}

    def begin(self) -> None:
        self._began, self._found = time.monotonic_ns(), {}

    def forget(self) -> None:
        self._found = {}

    def look(self) -> None:
        """Keep operations called since the last look.  Times of other backends are on the wall clock."""
        for group in ledger.groups(self._memory):
            if group.backend == "ccl":
                for each in group.operations:
                    if each.peer < 0 and each.enqueued >= self._began:
                        found = each.kind, each.enqueued, True
                        self._found["ccl", group.name, each.sequence] = found
        for entry in self._recorded():
            title = entry["profiling_name"]
            if not entry.get("is_p2p"):
                backend, _, kind = title.partition(":")
                key = backend, entry["process_group"][0], entry["collective_seq_id"]
                self._found[key] = kind, entry["time_created_ns"], False

    def seen(self, wall: int) -> list[tuple[str, str, int, str, int]]:
        """Return backend, group, sequence number, kind, and time of call on the monotonic clock."""
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


def _cores() -> CoreSet:
    return CoreSet(os.sched_getaffinity(0))


CHANGES = (
    Change(
        tuple(f"autograd.profiler.{name}" for name in STARTS),
        ("autograd.profiler.profile", "autograd._profiler_enabled", "autograd._add_metadata_json"),
        "only while steps are traced: ends the trace if the script starts torch's profiler itself",
        "no trace can be taken",
        lambda torch, tracer: tracer.give_way(torch),
    ),
)


def migrations() -> int:
    """Return how often the kernel moved this process's threads to another CPU; 0 if it doesn't say."""
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
