"""Dump what a rank's program and its children are doing, with their stacks, at the launcher's request.

The agent imports this at the first request.  Its loop is never blocked: py-spy runs as a process beside it,
and slow observations are finished later.

py-spy stops a process while it reads the stacks, except if the process can't be stopped or is stopped
already.  If py-spy is missing or not permitted, the agent sends a signal for which the bootstrap has
registered Python's own faulthandler, which writes the stacks to a memory file.
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
"""The largest number of child processes whose stacks are taken."""

MAX_NATIVE = 4
"""The largest number of processes with frames of C and C++, which take py-spy half a second each.

If there are more processes, only the program itself has them.
"""

MAX_PROCESSES = 256
"""The largest number of processes that are described."""

PATIENCE = 8.0
"""Seconds within which a request is answered, including its wait for earlier ones.  The answer says what is
missing."""

MOMENT = 0.5
"""Seconds between two observations of quotas and blocked threads, whose state shows only over time."""

COPIED_WITHIN = 1.5
"""Seconds within which a program copies groups of backends other than ccl into its ledger
(`runtime.observe.mirror`).  Later, the last copy is used."""

AT_ONCE = 2
"""The largest number of py-spy or gdb processes that run at the same time."""

LEAST = 0.5
"""Seconds that must remain of PATIENCE for an observation to begin."""

GONE_WITHIN = 0.2
"""Seconds within which py-spy ends after SIGKILL, unless it is blocked itself."""

MAX_FRAMES = 64
"""The largest number of frames per thread that gdb shows."""

MAX_TEXT = 1 << 25
"""The largest output of py-spy, gdb or faulthandler in bytes."""

MAX_DUMP = MAX_LINE * 3 // 4
"""The largest size of the field ``processes`` in a message, in bytes; the other fields have the rest."""


class Dumps:
    """Answers ``AskDump`` messages one after the other.

    Call ``check_time`` when it is ``due``.  Keys registered with the selector have an object with a method
    ``ready`` as their data, like the agent's other keys.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        running: Running | None,
        tell: Callable[[Dump], None],
    ) -> None:
        """``running`` is the program, or None if it was not started."""
        self._selector, self._tell = selector, tell
        self._stacks = running.stacks if running else None
        self._program = running.program.pid if running else 0
        self._ledger = running.ledger if running else None
        self._asked: deque[tuple[AskDump, float]] = deque()  # requests and their times
        self._look: Look | None = None
        self._copied_by = inf

    def ask(self, message: AskDump) -> None:
        self._asked.append((message, time.monotonic()))
        self.check_time()

    @property
    def due(self) -> float:
        """When to call ``check_time``, on the monotonic clock; infinite without a request."""
        return min(self._look.due, self._copied_by) if self._look else inf

    def _is_copied(self) -> bool:
        """Whether the ledger is up to date: its copies of groups are not older than the request.

        Also true if the request doesn't need fresh copies, or if COPIED_WITHIN has passed.
        """
        message, asked_at = self._asked[0]
        now, self._copied_by = time.monotonic(), inf
        if not message.fresh or self._ledger is None or now >= asked_at + COPIED_WITHIN:
            return True
        if ledger.backends(self._ledger) <= {"ccl"} or ledger.looked_at(self._ledger) / 1e9 >= asked_at:
            return True
        self._copied_by = now + COPIED_WITHIN / 20
        return False

    def check_time(self) -> None:
        """Continue the current observation, and answer requests that are complete."""
        while self._look or self._asked:
            if self._look is None:
                message, asked_at = self._asked[0]
                until = asked_at + PATIENCE
                if until < time.monotonic() + LEAST:  # earlier requests have used up its time
                    until = 0.0
                self._look = Look(message, until, self._program, self._selector, self._stacks)
            if not self._look.done() or not self._is_copied():
                return
            shown, errors = fit(self._look.processes, MAX_DUMP), self._look.errors
            if left_out := len(self._look.processes) - len(shown):
                errors.append(f"{left_out} more processes are left out: too much to send")
            groups = ledger_file.groups(self._ledger)
            message, _ = self._asked.popleft()
            self._tell(Dump(message.request, self._look.began, groups, shown, "; ".join(errors)))
            self._look = None


class Look:
    """One observation of all processes of the rank."""

    def __init__(
        self,
        asked: AskDump,
        until: float,
        program: int,
        selector: selectors.BaseSelector,
        stacks: int | None,
    ) -> None:
        """``program`` is the pid of the rank's program.  Whatever isn't observed by ``until`` is given up."""
        self.began, self._until = time.monotonic(), until
        self.processes: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._selector, self._stacks = selector, stacks
        self._again_at = inf
        self._spies: list[_Spy] = []
        self._writing: _Writing | None = None
        self._without: deque[dict[str, Any]] = deque()  # processes that py-spy can't read
        self._throttling: dict[int, Throttling] = {}
        self._py_spy, self._gdb = find_tool("py-spy", os.environ), find_tool("gdb", os.environ)
        self._describe(program)
        self._waiting = deque(self.processes[: 1 + MAX_STACKS])
        for each in self.processes[1 + MAX_STACKS :]:
            each["lacking"] = f"those of {MAX_STACKS} children were taken"
        few = len(self._waiting) <= MAX_NATIVE
        self._native = {
            each["pid"] for each in self._waiting if asked.native and (few or each["pid"] == program)
        }

    @property
    def due(self) -> float:
        """The latest time to call ``done``.  Call it also after reading output of py-spy."""
        return min(self._until, self._again_at, self._writing.due if self._writing else inf)

    def done(self) -> bool:
        """Continue, and return whether the observation is complete."""
        now = time.monotonic()
        spies, self._spies = self._spies, []
        self._spies += [spy for spy in spies if not self._take(spy)]
        if now >= self._until:
            self._give_up()
            return True
        if now >= self._again_at:
            self._look_again(now - self.began)
        while self._waiting and len(self._spies) < AT_ONCE:
            self._start(self._waiting.popleft())
        self._write()
        return not (self._spies or self._writing) and self._again_at == inf

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
            self._again_at = self.began + MOMENT

    def _is_tool(self, process: dict[str, Any]) -> bool:
        """Whether a process is a py-spy or gdb of an earlier observation that is about to exit."""
        tools = [tool for tool in (self._py_spy, self._gdb) if tool]
        named = [os.path.basename(tool) for tool in tools]  # an exiting process has only its name left
        program = str(process["command"]).partition(" ")[0]
        return process["parent"] == os.getpid() and program in (*tools, *named)

    def _look_again(self, seconds: float) -> None:
        """Observe quotas and blocked threads a second time, ``seconds`` after the first.

        Only threads that are still in the same call are blocked; a thread whose disk works is in another one.
        """
        self._again_at = inf
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
            self._spies.append(_Spy(argv, process, self._selector, from_py_spy, stops=stop))
        except OSError as e:
            self._fall_back(process, f"py-spy can't be run: {e.strerror}")

    def _start_gdb(self, process: dict[str, Any]) -> bool:
        """Start gdb for a program that isn't Python.  Returns whether that was possible."""
        if not self._gdb or process["pid"] not in self._native or not _can_be_stopped(process):
            return False
        self._native.discard(process["pid"])
        argv = [self._gdb, "-batch", "-nx", "-iex", "set auto-load off", "-p", str(process["pid"])]
        argv += ["-ex", "set print frame-arguments none", "-ex", f"thread apply all backtrace {MAX_FRAMES}"]
        try:
            self._spies.append(_Spy(argv, process, self._selector, from_gdb, stops=True))
        except OSError:
            return False
        return True

    def _take(self, spy: _Spy) -> bool:
        """Take the result of a py-spy or gdb if it has ended, and return whether it has.

        If py-spy fails, try gdb for a program that isn't Python, py-spy without frames of C, or faulthandler.
        """
        if not spy.ended:
            return False
        process = spy.process
        try:
            process["threads"] = spy.parse(spy.text, process["pid"])
            process["stacks"] = spy.name
        except ValueError:
            why, may_be_python = _why(spy.error)
            process["python"] = process["python"] and may_be_python
            if not process["python"] and self._start_gdb(process):
                return True
            if process["python"] and process["pid"] in self._native and _can_be_stopped(process):
                # For a process starved of CPU time, py-spy may fail to read the frames of C.
                self.errors.append(f"has shown no frames of C: {why}")
                self._native.discard(process["pid"])
                self._waiting.append(process)
                return True
            self._fall_back(process, why)
        return True

    def _fall_back(self, process: dict[str, Any], why: str) -> None:
        process["lacking"] = why
        self._without.append(process)

    # ---- faulthandler

    def _write(self) -> None:
        """Let processes that py-spy can't read write their stacks themselves, one at a time."""
        if self._writing and not self._writing.done():
            return
        self._writing = None
        while self._stacks is not None and self._without and not self._writing:
            process = self._without.popleft()
            seen = processes.stat(process["pid"])
            # Skip traced processes, whose debugger gets the signal, and stopped ones, which get it later.
            hears = seen and seen.state in "RS" and not process["traced_by"]
            if hears and processes.catches(process["pid"], STACKS_SIGNAL):
                self._writing = _Writing(process, self._stacks)

    def _give_up(self) -> None:
        late = [spy.process for spy in self._spies] + list(self._waiting)
        late += [self._writing.process] if self._writing else []
        for spy in self._spies:
            spy.kill()
        for process in late:
            process["lacking"] = f"not within {PATIENCE:g} s"


class _Writing:
    """A process that writes its stacks by faulthandler.

    faulthandler marks no end, so the text is complete once it has not grown for one PERIOD (in seconds).
    The wait ends after PERIODS of them.
    """

    PERIOD, PERIODS = 0.05, 40

    def __init__(self, process: dict[str, Any], fd: int) -> None:
        self.process, self._fd = process, fd
        self.due = time.monotonic() + self.PERIOD
        self._seen, self._left = 0, self.PERIODS
        os.ftruncate(self._fd, 0)
        try:
            os.kill(process["pid"], STACKS_SIGNAL)
        except OSError:  # the process has ended
            self._left = 0

    def done(self) -> bool:
        if self._left and time.monotonic() < self.due:
            return False
        size = os.fstat(self._fd).st_size
        if self._left and (size == 0 or size != self._seen):
            self._seen, self._left = size, self._left - 1
            self.due = time.monotonic() + self.PERIOD
            return False
        if size:
            text = os.pread(self._fd, min(size, MAX_TEXT), 0).decode(errors="replace")
            self.process["threads"] = from_faulthandler(text)
            self.process["stacks"] = "faulthandler"
        return True


class _Spy:
    """A running py-spy or gdb, with its stdout registered with the selector.

    ``ended`` says that all its output has been read.
    """

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
            # It is reaped with the orphans.  If we are killed, a sweep finds it by its job id.
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
        """Read a piece of its output.  Kill it if it prints more than MAX_TEXT bytes."""
        data = os.read(self._pipe, 1 << 20)
        self.text += data
        if not data:
            self._close()
        elif len(self.text) > MAX_TEXT:
            self.text = b""
            self.kill()
        return []

    def kill(self) -> None:
        """Kill the tool, wait until its end of the pipe is closed, and let the process it stopped go on."""
        with contextlib.suppress(ProcessLookupError):  # it has already ended and been reaped
            os.kill(self._pid, signal.SIGKILL)
        select.select([self._pipe], [], [], GONE_WITHIN)
        seen = processes.stat(self.process["pid"])
        if self._stops and seen and seen.state == "T":
            os.kill(self.process["pid"], signal.SIGCONT)  # it was stopped by this py-spy
        self._close()

    def _close(self) -> None:
        self.ended = True
        self.error = os.pread(self._errors, 10_000, 0).decode(errors="replace")
        self._selector.unregister(self._pipe)
        os.close(self._pipe)
        os.close(self._errors)


def find_tool(name: str, environ: Mapping[str, str]) -> str | None:
    """Find a program next to the interpreter or on the PATH.  None if it is not installed."""
    directories = [os.path.dirname(sys.executable), *environ.get("PATH", "").split(os.pathsep)]
    return shutil.which(name, path=os.pathsep.join(filter(None, directories)))


def _can_be_stopped(process: dict[str, Any]) -> bool:
    """Whether py-spy can stop a process.  It would wait for one that is blocked, traced or stopped."""
    return process["state"] in "RS" and not process["traced_by"] and not process["blocked"]


def _why(error: str) -> tuple[str, bool]:
    """Summarize an error message of py-spy or gdb.  Also return whether the program may be Python."""
    if "ermission" in error or "not permitted" in error or "EPERM" in error:
        return "py-spy may not look (ptrace is forbidden)", True
    if "python version" in error or "not a python" in error.lower():
        return "it is not a Python program", False
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    said = f"py-spy: {lines[0].removeprefix('Error: ')[:200]}" if lines else "py-spy said nothing"
    return said, True
