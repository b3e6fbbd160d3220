"""The event loop of an attempt: it feeds the job's state machine with events, and carries out its actions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from cpulaunch import launchers, messages
from cpulaunch.errors import HostError
from cpulaunch.launchers.base import Launcher
from cpulaunch.model.hosts import fold_hosts
from cpulaunch.supervise.attempts.attempt import ENDING, Attempt, RunningAttempt
from cpulaunch.supervise.attempts.start import at_once, max_strangers
from cpulaunch.supervise.attempts.stop import end_processes
from cpulaunch.supervise.attempts.sweep import PATIENCE, TIMEOUT, Unswept, local_failures, sweep, sweep_hosts
from cpulaunch.supervise.control.observer_messages import Status
from cpulaunch.supervise.control.observers import Observers, status_of
from cpulaunch.supervise.control.port import Control
from cpulaunch.supervise.control.registry import Announcement
from cpulaunch.supervise.job import events
from cpulaunch.supervise.job.job import JobState
from cpulaunch.supervise.job.outcome import Outcome
from cpulaunch.supervise.job.processes import SETTLE
from cpulaunch.supervise.job.rank import LONG_WAIT, Rank, RankState
from cpulaunch.supervise.job.state import Watching
from cpulaunch.supervise.output.lines import Console
from cpulaunch.supervise.profiling.request import profiled_steps
from cpulaunch.supervise.profiling.traces import Profile, Profiling
from cpulaunch.supervise.stalls.progress import REPORT, stall_settings
from cpulaunch.supervise.telemetry.rows import Row

EXIT_LOST = 0.5
"""Seconds that mpiexec has to end by itself after a host is lost, because it may wait for that host."""

LONG_START = 1.0
"""Seconds after which an agent without a hello no longer delays the start of others."""

SOON = 0.1
"""Seconds until the next tick after a message, as agents of a big job send many at the same time."""

SHOWN_FIELDS = (
    "type", "pid", "cores", "comm_cores", "threads", "code", "signal", "by_launcher",
    "error", "cause", "note",
)  # fmt: skip
"""The fields of an event that ``-v`` shows."""


class AttemptLoop:
    """One attempt, from the start of its processes to its outcome.

    ``unswept`` are hosts on which processes of the attempt may be left at its end.
    """

    def __init__(
        self,
        running: RunningAttempt,
        console: Console,
        began: float,
        *,
        stalls: int = 0,
        thorough: bool = False,
        traced: bool = False,
    ) -> None:
        """``began`` is the start of the job's first attempt, on the monotonic clock.

        ``stalls`` is the number of stalls in earlier attempts.  ``thorough``: if this attempt fails, look for
        its processes on every host, as another attempt may follow.  ``traced``: an earlier attempt has traced
        the steps that ``--profile`` names.
        """
        self.attempt, self.starter, self._listener = running.attempt, running.starter, running.listener
        self._address, self._early_signals = running.address, running.early_signals
        self._keeps_signal = True  # keep the first signal until ranks can save their state
        self.processes = self.starter.processes
        self.console, self.output = console, console.output
        plan = self.attempt.plan
        self.launcher = launchers.load(plan.launcher)
        self._noise = tuple(prefix.encode() for prefix in self.launcher.noise)
        self.job = JobState(settings_of(self.attempt, self.launcher), time.monotonic(), began)
        token, ranks = self.attempt.token, self.job.ranks
        self.profiling = Profiling(ranks, self._send, console.directory, plan.names)
        requests = self._request_dump, self._request_progress
        self.observers = Observers(token, ranks, self._status, *requests, self.profiling)
        strangers = max_strangers(plan.here_alone)
        self.control = Control(token, plan.world_size, self, self.observers, strangers)
        self.unswept: list[Unswept] = []
        self._began, self._stalls, self._thorough = began, stalls, thorough
        self.traced = traced
        self._started = time.monotonic()
        self._recorded = False  # whether any telemetry of this attempt was recorded
        self._hosts_here: set[str] = set()  # this host's names in the plan
        self._due = asyncio.Event()  # set when a tick is due
        self._soon: asyncio.TimerHandle | None = None  # for a tick after ``SOON`` seconds
        self._child_ended = asyncio.Event()
        self._look_at_children = True
        self._ended: set[int] = set()  # processes whose end was passed on to the job
        self._starting = dict.fromkeys(range(len(self.processes)), time.monotonic())  # agent → start time
        self._arrival = asyncio.Event()  # set when an agent has connected or ended
        self._ending: list[asyncio.Task[None]] = []
        self._waited: list[str] = []  # what took long in the clean-up
        self._error: Exception | None = None  # a bug of ours, raised anywhere in the loop

    async def run(self) -> Outcome:
        """Watch the attempt until all ranks have ended, and return its outcome.

        Returns when no process of the job is left on any host.  An internal error ends the job, and is raised
        after the clean-up.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, *ENDING):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(number, self._user_signal, number)
        loop.add_signal_handler(signal.SIGCHLD, self._child_has_ended)
        self.control.listen(self._listener)
        announcement = Announcement(
            self.console.directory, self.attempt.job_id, self._address, self.attempt.token,
            self.attempt.plan, self._began,
        )  # fmt: skip
        relays = [
            asyncio.create_task(self._relay(pipe, stream))
            for stream, pipe in enumerate(self.starter.pipes, start=1)
        ]
        starting = asyncio.create_task(self._start_others())
        try:
            self.output.screen.serve_loop()
            loop.call_later(LONG_START, self._take_early_signals)
            if not self.traced and (window := profiled_steps(self.attempt.plan)):
                self.profiling.from_start(*window, self._profiled)
            await self._watch()
            await self.profiling.finish(failed=self._error is not None or self.job.ending)
        finally:
            self.attempt.release_port()
            try:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                self.starter.close()
                await self._clean_up()
            finally:
                # A process that we can't end may still hold a pipe open.
                _, pending = await asyncio.wait(relays, timeout=SETTLE)
                for relay in pending:
                    relay.cancel()
                self.control.close()
                announcement.withdraw()
        if self._error is not None:
            raise self._error
        for rank in self.job.ranks:
            self.output.finish(rank.rank)
        self.output.flush()
        if refused := str(self.control.refused):
            self.console.tell(refused)
        return self.job.outcome(time.monotonic(), self._waited)

    async def _watch(self) -> None:
        while not self.job.finished and self._error is None:
            now = time.monotonic()
            due = min(now + self.job.tick_period, self.job.wake_at or now + self.job.tick_period)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._due.wait(), max(0.0, due - now))
            self._due.clear()
            self._soon = None
            self._look_at_processes()
            self._handle(events.Tick(terminal_full=self.output.full))

    # ---- starting

    async def _start_others(self) -> None:
        """Start the remaining agents, a limited number at a time, while the loop serves the others."""
        try:
            while self.starter.left and not self.job.ending:
                if self._room_to_start():
                    self._starting[len(self.processes)] = time.monotonic()
                    self.starter.start_next()
                    await asyncio.sleep(0)
                else:
                    self._arrival.clear()
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._arrival.wait(), SOON)
        except HostError as e:
            self._handle(events.StartFailed(len(self.processes), str(e)))
        except Exception as e:
            self._error = self._error or e
        if self.starter.left:
            self.starter.close()
            self._handle(events.NotStarted(len(self.processes)))
        self._due.set()

    def _room_to_start(self) -> bool:
        """Whether another agent may be started now, not counting agents that take long to start."""
        long_ago = time.monotonic() - LONG_START
        while self._starting and self._starting[first := next(iter(self._starting))] < long_ago:
            del self._starting[first]
        return len(self._starting) < at_once()

    def _note_arrival(self, number: int) -> None:
        self._starting.pop(number, None)
        self._arrival.set()
        asyncio.get_running_loop().call_soon(self._take_early_signals)  # after the event is handled

    # ---- events

    def agent_connected(self, rank: int, hello: messages.Hello, *, here: bool) -> None:
        self._note_arrival(rank)
        self._look_soon()
        if here:
            self._hosts_here.add(self.job.ranks[rank].host)
        self._handle(events.AgentConnected(rank, hello, here))

    def agent_sent(self, rank: int, message: messages.AgentMessage | messages.Unknown) -> None:
        if not isinstance(message, (messages.Output, messages.Beat, messages.Steps)):
            self._look_soon()
        if rank == 0 and isinstance(message, messages.Started):
            self.attempt.release_port()
        self._handle(events.AgentSent(rank, message))
        self.profiling.handle_message(rank, message)

    def agent_reconnected(self, rank: int) -> None:
        self._handle(events.AgentReconnected(rank))

    def agent_disconnected(self, rank: int, error: str) -> None:
        self._look_soon()
        self._handle(events.AgentDisconnected(rank, error))
        self.profiling.handle_disconnection(rank)

    @property
    def full(self) -> bool:
        return self.output.full

    async def room(self) -> None:
        await self.output.room()

    def _look_soon(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(SOON, self._due.set)

    def _status(self) -> Status:
        now, job = time.monotonic(), self.job
        return status_of(
            job.ranks,
            now - self._began,
            self.attempt.restart_count,
            ending=job.ending,
            stalled=job.stalled(now),
            stated=job.metrics.rates(),
        )

    def _send(self, rank: int, message: messages.LauncherMessage) -> None:
        self.control.send(rank, message)

    def _profiled(self, profile: Profile) -> None:
        if profile.error:
            self.console.tell(f"no trace: {profile.error}")
            return
        self.traced = True
        first, *others = profile.brief
        for line in (f"traced {first}", *others):
            self.console.tell(line)
        self.console.tell(
            f"trace, with more findings beside it: {self.console.directory.path / profile.file}"
        )

    def _request_dump(self, native: bool) -> None:
        self._handle(events.DumpRequested(native))
        self._due.set()  # so that the loop reads the new ``wake_at``

    def _request_progress(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            self._send(rank.rank, messages.AskProgress())

    def _take_early_signals(self) -> None:
        """Handle the signals that came before the first agent, or in the first ``LONG_START`` seconds."""
        self._keeps_signal = False
        while self._early_signals:
            self._user_signal(self._early_signals.pop())

    def _user_signal(self, number: int) -> None:
        if self._keeps_signal and not self._early_signals:
            self._early_signals.append(number)
            return
        self._due.set()
        self.output.hurry()
        self._handle(events.UserSignal(number))

    def _child_has_ended(self) -> None:
        self._look_at_children = True
        self._look_soon()
        self._child_ended.set()

    def _look_at_processes(self) -> None:
        if not self._look_at_children:
            return
        self._look_at_children = False
        for number, process in enumerate(self.processes):
            if number not in self._ended and (code := process.poll()) is not None:
                self._ended.add(number)
                self._note_arrival(number)
                if not self.launcher.ends_with_network:
                    self.control.expect_nobody_back()
                self._handle(events.ProcessEnded(number, code))

    async def _relay(self, source: int, stream: int) -> None:
        """Log the output of mpiexec, ssh and unwatched agents; show it until the ranks are being ended."""
        pipe = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(pipe), os.fdopen(source, "rb", 0)
        )
        while data := await pipe.read(1 << 16):
            self.output.log_launcher(data)
            self._handle(events.ProcessPrinted(data))
            if not self.job.ending:
                shown = (line for line in data.splitlines(True) if not line.startswith(self._noise))
                self.output.screen.put(stream, b"".join(shown))
            await self.room()

    # ---- actions

    def _handle(self, event: events.Event) -> None:
        try:
            for action in self.job.handle(event, time.monotonic()):
                self._carry_out(action)
        except Exception as e:  # asyncio would only print an exception of a callback
            self._error = self._error or e
            self._due.set()

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.Write(rank, stream, data):
                self.output.feed(rank, stream, data)
            case events.Send(rank, message):
                self.control.send(rank, message)
            case events.HideStderr(rank):
                self.output.hide(rank, 2)
            case events.Tell(line):
                self.console.tell(line)
            case events.Log(entry):
                self._log(entry)
            case events.Record(rows):
                self._record(rows)
            case events.ShowStatus(text):
                self.output.screen.status(text)
            case events.ReportStall():
                self._report_stall(action)
            case events.DumpFinished():
                self.observers.deliver(action)
            case events.EndProcesses():
                self._ending.append(asyncio.create_task(self._end_processes(0)))
            case events.Finish():
                self._due.set()

    def _record(self, rows: Sequence[Row]) -> None:
        if self.console.telemetry and not self._recorded:
            self._recorded = True
            began = round(self._started - self._began, 3)
            attempt = {"attempt": self.attempt.restart_count, "time": began}
            plan = self.attempt.plan
            hosts = {host.host: len(host.ranks) for host in plan.hosts}
            rows = [{**attempt, "world_size": plan.world_size, "hosts": hosts}, *rows]
        for sink in self.console.telemetry:
            sink.rows(rows)

    def _report_stall(self, action: events.ReportStall) -> None:
        from cpulaunch.supervise.output import stall_box

        action = action._replace(number=self._stalls + action.number)
        name, names = f"stacks-{action.number}.txt", self.attempt.plan.names
        text = stall_box.stacks_text(action, names).encode(errors="replace")
        self.output.logs.append(name, text, private=True)
        file = self.console.directory.path / name
        brief = stall_box.stall_line(action, file) if action.brief else ""
        self.output.screen.say(brief or stall_box.stall_box(action, file, names))
        if action.number == 1 and self.attempt.plan.settings.watch.stall_action == REPORT:
            self.console.tell("the job goes on (--stall-action report); Ctrl-C ends it")

    def _log(self, entry: Mapping[str, Any]) -> None:
        self.output.logs.append("events.jsonl", json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        if self.console.verbose:
            shown = {**entry, "cause": (entry.get("cause") or {}).get("kind")}
            values = (f"{k}={shown[k]}" for k in SHOWN_FIELDS if shown.get(k) is not None)
            number = entry["rank"]
            names = self.attempt.plan.names
            who = f"no {names.noun}"
            if number is not None:
                who = f"{names.one(number)} on {self.job.ranks[number].host}"
            self.console.tell(f"{entry['seconds']:.3f} s: {who}: {' '.join(values)}")

    # ---- the end

    async def _clean_up(self) -> None:
        """End the launcher's processes, and kill all processes of the job that are left on any host."""
        untidy = self.job.untidy
        hosts = set() if self.attempt.plan.here_alone else {rank.host for rank in untidy}
        thorough = self._thorough and self.job.failed
        try:
            await asyncio.gather(
                *self._ending,
                self._end_launcher(untidy, hosts, thorough=thorough),
                self._timed(f"a look at {fold_hosts(sorted(hosts))}", self._sweep(hosts)),
            )
            if unswept := local_failures(self.unswept, self.launcher.reach.program):
                self.console.tell(unswept)
        finally:
            if untidy:
                sweep(self.attempt.job_id)
        self._look_at_processes()
        if thorough and (slow := hosts & {left.host for left in self.unswept} - self.job.lost_hosts):
            self.unswept = [left for left in self.unswept if left.host not in slow]
            what = f"a second look at {fold_hosts(sorted(slow))}"
            await self._timed(what, self._sweep(slow, PATIENCE))

    async def _end_launcher(self, untidy: list[Rank], swept: set[str], *, thorough: bool) -> None:
        """End the launcher's processes, so that no process of the job starts any more.

        ``thorough``: also sweep the hosts that aren't in ``swept``, whose agents have reported that no
        process is left.
        """
        lost = any(rank.state is RankState.LOST for rank in untidy)
        what = "its agents" if self.launcher.agents_are_children else self.launcher.title
        await self._timed(what, self._end_processes(EXIT_LOST if lost else self.launcher.exit_patience))
        if not thorough:
            return
        sweep(self.attempt.job_id)
        if not self.attempt.plan.here_alone:
            others = {rank.host for rank in self.job.ranks} - swept - self._hosts_here
            await self._timed("a look at the other hosts", self._sweep(others, PATIENCE))

    async def _timed(self, what: str, doing: Awaitable[None]) -> None:
        """Await ``doing``, and record it in ``_waited`` if it took long."""
        began = time.monotonic()
        await doing
        if (took := time.monotonic() - began) > LONG_WAIT:
            self._waited.append(f"{took:.0f} s for {what}")

    async def _sweep(self, hosts: set[str], patience: float = TIMEOUT) -> None:
        self.unswept += await sweep_hosts(hosts, self.attempt.job_id, self.launcher.reach, patience)

    async def _end_processes(self, patience: float) -> None:
        await end_processes(self.processes, patience, self.launcher.stop_signals, self._child_ended)


def settings_of(attempt: Attempt, launcher: Launcher) -> Watching:
    plan = attempt.plan
    return Watching(
        hosts=[host.host for host in plan.hosts for _ in host.ranks],
        launcher=launcher,
        processes=len(attempt.commands),
        command="the agent" if launcher.agents_are_children else plan.mpiexec or launcher.title,
        heartbeat_timeout=plan.settings.watch.heartbeat_timeout,
        grace_period=plan.settings.watch.grace_period,
        here_alone=plan.here_alone,
        stalls=stall_settings(plan),
        restarts=attempt.restart_count,
        names=plan.names,
        independent=plan.instances is not None,
        go_on=plan.instances is not None and not plan.settings.instances.fail_fast,
    )
