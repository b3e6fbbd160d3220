"""Dump the states and stacks of a rank's program and its children, at the launcher's request.

The agent imports this at the first request.  Nothing here blocks the agent's loop: py-spy runs as a separate
process, and its result is collected later.

py-spy stops a process while it reads the stacks, unless the process is already stopped or can't be stopped.
If py-spy is missing or not permitted, the agent sends STACKS_SIGNAL instead.  The bootstrap has registered
Python's faulthandler for this signal; it writes the stacks to a memory file.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from cpulaunch import ledger, variables
from cpulaunch.agent.launch.start import STACKS_SIGNAL, Running
from cpulaunch.agent.observe import processes
from cpulaunch.agent.observe.stacks import fit, from_faulthandler, from_gdb, from_py_spy
from cpulaunch.agent.program import ledger_file
from cpulaunch.discovery.host.cgroup import Throttling
from cpulaunch.messages import AskDump, Dump
from cpulaunch.wire import MAX_LINE

MAX_STACKS = 16
"""The largest number of child processes whose stacks are read."""

MAX_NATIVE = 4
"""If there are more processes, frames of C and C++ are read only for the program itself.  py-spy needs half a
second for those of each process."""

MAX_PROCESSES = 256
"""The largest number of processes that are described."""

ANSWER_TIMEOUT = 8.0
"""Seconds within which a request is answered, even if the answer is incomplete.  They include the wait for
earlier requests."""

INTERVAL = 0.5
"""Seconds between the two observations of quotas and blocked threads."""

COPY_TIMEOUT = 1.5
"""Seconds to wait until the program has copied the groups of other backends than ccl into its ledger
(`runtime.observe.mirror`).  After that, the dump contains the previous copy."""

MAX_TOOLS = 2
"""The largest number of py-spy or gdb processes that run at the same time."""

MIN_TIME = 0.5
"""An observation begins only if this many seconds of ANSWER_TIMEOUT remain."""

KILL_TIMEOUT = 0.2
"""Seconds to wait for the end of py-spy after SIGKILL."""

MAX_FRAMES = 64
"""The largest number of frames per thread that gdb shows."""

MAX_TEXT = 1 << 25
"""The largest output of py-spy, gdb or faulthandler in bytes."""

MAX_DUMP = MAX_LINE * 3 // 4
"""The largest size of the field ``processes`` in a message, in bytes."""


class Dumps:
    """Answers ``AskDump`` messages one after the other.

    Call ``check_time`` when it is ``due``, and ``ready`` of each selector key's data when the key is ready.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        running: Running | None,
        send: Callable[[Dump], None],
    ) -> None:
        """``running`` is the program, or None if it was not started."""
        self._selector, self._send = selector, send
        self._stacks = running.stacks if running else None
        self._program = running.program.pid if running else 0
        self._ledger = running.ledger if running else None
        self._requests: deque[tuple[AskDump, float]] = deque()  # requests and their times
        self._observation: Observation | None = None
        self._ledger_due = inf

    def ask(self, message: AskDump) -> None:
        self._requests.append((message, time.monotonic()))
        self.check_time()

    @property
    def due(self) -> float:
        """When to call ``check_time``, on the monotonic clock; infinite without a request."""
        return min(self._observation.due, self._ledger_due) if self._observation else inf

    def _is_ledger_fresh(self) -> bool:
        """Whether the ledger's copies of groups are newer than the request, or need not be waited for."""
        message, requested_at = self._requests[0]
        now, self._ledger_due = time.monotonic(), inf
        if not message.fresh or self._ledger is None or now >= requested_at + COPY_TIMEOUT:
            return True
        if ledger.backends(self._ledger) <= {"ccl"} or ledger.looked_at(self._ledger) / 1e9 >= requested_at:
            return True
        self._ledger_due = now + COPY_TIMEOUT / 20
        return False

    def check_time(self) -> None:
        """Continue the current observation, and answer requests that are complete."""
        while self._observation or self._requests:
            if self._observation is None:
                message, requested_at = self._requests[0]
                until = requested_at + ANSWER_TIMEOUT
                if until < time.monotonic() + MIN_TIME:  # earlier requests have used up the time
                    until = 0.0
                self._observation = Observation(message, until, self._program, self._selector, self._stacks)
            if not self._observation.done() or not self._is_ledger_fresh():
                return
            sent, errors = fit(self._observation.processes, MAX_DUMP), self._observation.errors
            if left_out := len(self._observation.processes) - len(sent):
                errors.append(f"{left_out} more processes are left out: too much to send")
            groups = ledger_file.groups(self._ledger)
            message, _ = self._requests.popleft()
            self._send(Dump(message.request, self._observation.began, groups, sent, "; ".join(errors)))
            self._observation = None


class Observation:
    """One observation of all processes of the rank."""

    def __init__(
        self,
        request: AskDump,
        until: float,
        program: int,
        selector: selectors.BaseSelector,
        stacks: int | None,
    ) -> None:
        """``program`` is the pid of the rank's program.  The observation ends at ``until`` at the latest."""
        self.began, self._until = time.monotonic(), until
        self.processes: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._selector, self._stacks = selector, stacks
        self._second_at = inf
        self._tools: list[_Tool] = []
        self._faulthandler: _Faulthandler | None = None
        self._unread: deque[dict[str, Any]] = deque()  # processes that py-spy can't read
        self._throttling: dict[int, Throttling] = {}
        self._py_spy, self._gdb = find_tool("py-spy", os.environ), find_tool("gdb", os.environ)
        self._describe(program)
        self._waiting = deque(self.processes[: 1 + MAX_STACKS])
        for each in self.processes[1 + MAX_STACKS :]:
            each["lacking"] = f"those of {MAX_STACKS} children were taken"
        few = len(self._waiting) <= MAX_NATIVE
        self._native = {
            each["pid"] for each in self._waiting if request.native and (few or each["pid"] == program)
        }

    @property
    def due(self) -> float:
        """The latest time to call ``done``.  Call ``done`` also after reading output of a tool."""
        return min(self._until, self._second_at, self._faulthandler.due if self._faulthandler else inf)

    def done(self) -> bool:
        """Continue, and return whether the observation is complete."""
        now = time.monotonic()
        tools, self._tools = self._tools, []
        self._tools += [tool for tool in tools if not self._collect(tool)]
        if now >= self._until:
            self._give_up()
            return True
        if now >= self._second_at:
            self._observe_again(now - self.began)
        while self._waiting and len(self._tools) < MAX_TOOLS:
            self._start(self._waiting.popleft())
        self._run_faulthandler()
        return not (self._tools or self._faulthandler) and self._second_at == inf

    def _describe(self, program: int) -> None:
        members = sorted(processes.family(os.getpid()), key=lambda pid: pid != program)
        for pid in members[:MAX_PROCESSES]:
            described = processes.describe(pid)
            if described and described["state"] not in "ZX" and not self._is_tool(described):
                self.processes.append(described)
                if quota := processes.throttling(pid):
                    self._throttling[pid] = quota
        if len(members) > MAX_PROCESSES:
            self.errors.append(f"{len(members) - MAX_PROCESSES} more processes were not looked at")
        if not self.processes or self.processes[0]["pid"] != program:
            self.errors.append("its program has ended, or was not started")
        if self._throttling or any(each["blocked"] for each in self.processes):
            self._second_at = self.began + INTERVAL

    def _is_tool(self, process: dict[str, Any]) -> bool:
        """Whether a process is a py-spy or gdb that remains from an earlier observation."""
        tools = [tool for tool in (self._py_spy, self._gdb) if tool]
        named = [os.path.basename(tool) for tool in tools]  # an exiting process has only its name left
        program = str(process["command"]).partition(" ")[0]
        return process["parent"] == os.getpid() and program in (*tools, *named)

    def _observe_again(self, seconds: float) -> None:
        """Observe quotas and blocked threads a second time, ``seconds`` after the first.

        A thread counts as blocked only if it is still in the same system call.
        """
        self._second_at = inf
        for each in self.processes:
            pid = each["pid"]
            if (before := self._throttling.get(pid)) and (after := processes.throttling(pid)):
                each["throttled"] = processes.throttled(before, after, seconds)
            if each["blocked"]:
                still = processes.blocked(pid)
                each["blocked"] = [thread for thread in each["blocked"] if thread in still]

    # ---- py-spy

    def _start(self, process: dict[str, Any]) -> None:
        if self._py_spy is None:
            self._fall_back(process, "py-spy was not found")
            return
        pid, stop = process["pid"], _can_be_stopped(process)
        argv = [self._py_spy, "dump", "--json", "--pid", str(pid)]
        argv += ([] if stop else ["--nonblocking"]) + (["--native"] if stop and pid in self._native else [])
        try:
            self._tools.append(_Tool(argv, process, self._selector, from_py_spy, stops=stop))
        except OSError as e:
            self._fall_back(process, f"py-spy can't be run: {e.strerror}")

    def _start_gdb(self, process: dict[str, Any]) -> bool:
        """Start gdb for a process that isn't Python.  Return whether that was possible."""
        if not self._gdb or process["pid"] not in self._native or not _can_be_stopped(process):
            return False
        self._native.discard(process["pid"])
        argv = [self._gdb, "-batch", "-nx", "-iex", "set auto-load off", "-p", str(process["pid"])]
        argv += ["-ex", "set print frame-arguments none", "-ex", f"thread apply all backtrace {MAX_FRAMES}"]
        try:
            self._tools.append(_Tool(argv, process, self._selector, from_gdb, stops=True))
        except OSError:
            return False
        return True

    def _collect(self, tool: _Tool) -> bool:
        """Collect the result of a tool if it has ended, and return whether it has.

        If py-spy fails, try the next method: gdb for a process that isn't Python, else py-spy without frames
        of C, else faulthandler.
        """
        if not tool.ended:
            return False
        process = tool.process
        try:
            process["threads"] = tool.parse(tool.text, process["pid"])
            process["stacks"] = tool.name
        except ValueError:
            why, may_be_python = _summary(tool.error)
            process["python"] = process["python"] and may_be_python
            if not process["python"] and self._start_gdb(process):
                return True
            if process["python"] and process["pid"] in self._native and _can_be_stopped(process):
                # If the process gets little CPU time, py-spy may fail to read frames of C.
                self.errors.append(f"has shown no frames of C: {why}")
                self._native.discard(process["pid"])
                self._waiting.append(process)
                return True
            self._fall_back(process, why)
        return True

    def _fall_back(self, process: dict[str, Any], why: str) -> None:
        process["lacking"] = why
        self._unread.append(process)

    # ---- faulthandler

    def _run_faulthandler(self) -> None:
        """Run faulthandler in processes that py-spy can't read, one at a time."""
        if self._faulthandler and not self._faulthandler.done():
            return
        self._faulthandler = None
        while self._stacks is not None and self._unread and not self._faulthandler:
            process = self._unread.popleft()
            status = processes.stat(process["pid"])
            # In a traced process, the debugger gets the signal; a stopped process gets it too late.
            can_handle = status and status.state in "RS" and not process["traced_by"]
            if can_handle and processes.catches(process["pid"], STACKS_SIGNAL):
                self._faulthandler = _Faulthandler(process, self._stacks)

    def _give_up(self) -> None:
        unfinished = [tool.process for tool in self._tools] + list(self._waiting)
        unfinished += [self._faulthandler.process] if self._faulthandler else []
        for tool in self._tools:
            tool.kill()
        for process in unfinished:
            process["lacking"] = f"not within {ANSWER_TIMEOUT:g} s"


class _Faulthandler:
    """A process whose faulthandler writes its stacks.

    faulthandler doesn't mark the end of its text.  The text counts as complete once it has not grown for
    PERIOD seconds.  The wait ends after PERIODS of these periods.
    """

    PERIOD, PERIODS = 0.05, 40

    def __init__(self, process: dict[str, Any], fd: int) -> None:
        self.process, self._fd = process, fd
        self.due = time.monotonic() + self.PERIOD
        self._size, self._left = 0, self.PERIODS
        os.ftruncate(self._fd, 0)
        try:
            os.kill(process["pid"], STACKS_SIGNAL)
        except OSError:  # the process has ended
            self._left = 0

    def done(self) -> bool:
        if self._left and time.monotonic() < self.due:
            return False
        size = os.fstat(self._fd).st_size
        if self._left and (size == 0 or size != self._size):
            self._size, self._left = size, self._left - 1
            self.due = time.monotonic() + self.PERIOD
            return False
        if size:
            text = os.pread(self._fd, min(size, MAX_TEXT), 0).decode(errors="replace")
            self.process["threads"] = from_faulthandler(text)
            self.process["stacks"] = "faulthandler"
        return True


class _Tool:
    """A running py-spy or gdb.  ``ended`` says that all its output has been read."""

    def __init__(
        self,
        argv: list[str],
        process: dict[str, Any],
        selector: selectors.BaseSelector,
        parse: Callable[[bytes, int], list[dict[str, Any]]],
        *,
        stops: bool,
    ) -> None:
        """``stops`` says that the tool stops the process.  Raises OSError if the tool can't be run."""
        self.parse, self.name = parse, os.path.basename(argv[0])
        self.process, self.text, self.error, self.ended = process, b"", "", False
        self._selector, self._stops = selector, stops
        self._pipe, end = os.pipe()
        self._errors = os.memfd_create("errors")
        try:
            actions = (
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, end, 1),
                (os.POSIX_SPAWN_DUP2, self._errors, 2),
            )
            # It is reaped with the orphans.  If the agent is killed, the launcher finds it by its job id.
            env = {"RUST_BACKTRACE": "0", variables.JOB_ID: os.environ.get(variables.JOB_ID, "")}
            self._pid = os.posix_spawn(argv[0], argv, env, file_actions=actions)
        except OSError:
            os.close(self._pipe)
            os.close(self._errors)
            raise
        finally:
            os.close(end)
        selector.register(self._pipe, selectors.EVENT_READ, self)

    def ready(self, events: int) -> list[Any]:
        """Read output.  Kill the tool if it prints more than MAX_TEXT bytes."""
        data = os.read(self._pipe, 1 << 20)
        self.text += data
        if not data:
            self._close()
        elif len(self.text) > MAX_TEXT:
            self.text = b""
            self.kill()
        return []

    def kill(self) -> None:
        """Kill the tool, wait for its end, and continue the process that it stopped."""
        with contextlib.suppress(ProcessLookupError):  # it has already ended and been reaped
            os.kill(self._pid, signal.SIGKILL)
        select.select([self._pipe], [], [], KILL_TIMEOUT)
        status = processes.stat(self.process["pid"])
        if self._stops and status and status.state == "T":
            os.kill(self.process["pid"], signal.SIGCONT)
        self._close()

    def _close(self) -> None:
        self.ended = True
        self.error = os.pread(self._errors, 10_000, 0).decode(errors="replace")
        self._selector.unregister(self._pipe)
        os.close(self._pipe)
        os.close(self._errors)


def find_tool(name: str, environ: Mapping[str, str]) -> str | None:
    """Find a program beside the interpreter or on the PATH.  None if it is not installed."""
    directories = [os.path.dirname(sys.executable), *environ.get("PATH", "").split(os.pathsep)]
    return shutil.which(name, path=os.pathsep.join(filter(None, directories)))


def _can_be_stopped(process: dict[str, Any]) -> bool:
    """Whether py-spy can stop a process.  For a blocked, traced or stopped process, it would hang."""
    return process["state"] in "RS" and not process["traced_by"] and not process["blocked"]


def _summary(error: str) -> tuple[str, bool]:
    """Summarize an error message of py-spy or gdb.  Also return whether the program may be Python."""
    if "ermission" in error or "not permitted" in error or "EPERM" in error:
        return "py-spy may not look (ptrace is forbidden)", True
    if "python version" in error or "not a python" in error.lower():
        return "it is not a Python program", False
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    summary = f"py-spy: {lines[0].removeprefix('Error: ')[:200]}" if lines else "py-spy printed no error"
    return summary, True
