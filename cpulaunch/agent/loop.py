"""The agent: the parent process of one rank's program.

It finds out its rank, sets the program's cores and environment, and starts the program.  Then it sends the
program's output and exit status to the launcher, forwards signals, and ends the program if the launcher is
gone.  It imports only the standard library, so that it takes a few megabytes and starts in milliseconds.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import sys
import time
from typing import TYPE_CHECKING

from cpulaunch import ledger, messages, variables, wire
from cpulaunch.agent.launch.child import Ended, adopt_orphans_and_die_with, set_open_files, signal_pipe
from cpulaunch.agent.launch.environment import Identity, identify
from cpulaunch.agent.launch.start import Running, start_program
from cpulaunch.agent.link import Link, LinkState
from cpulaunch.agent.observe.out_of_memory import oom_kills, why_killed
from cpulaunch.agent.output import REPORTS, Pipes, Printer, Reports
from cpulaunch.agent.program import ledger_file
from cpulaunch.cause import Cause, Kind
from cpulaunch.errors import CpulaunchError, HostError
from cpulaunch.messages import BEATS_PER_TIMEOUT, UNREACHED, AgentMessage, LauncherMessage, Report, Unknown
from cpulaunch.plan.placement import Placement, unguard
from cpulaunch.wire import MAX_OUTPUT

if TYPE_CHECKING:
    from typing import Any

    from cpulaunch.agent.observe.dump import Dumps
    from cpulaunch.agent.observe.telemetry import Telemetry
    from cpulaunch.agent.observe.traces import RankTraces

MAX_PENDING = 1 << 20
"""The agent stops reading the program's output while more bytes than this wait for the launcher."""

MAX_LEFTOVERS = 3
"""The largest number of leftover processes whose names are printed."""

LEFTOVERS_AFTER = 1.0
"""Seconds after the program's end until its leftover processes are reported."""

FULL_PIPE = 1 << 20
"""The largest capacity of a pipe in bytes, for users other than root (pipe(7))."""

_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_TERMINATING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    adopt_orphans_and_die_with(signal.SIGTERM)
    try:
        placement = Placement.from_variables(os.environ)
        identity = identify(placement.launcher, placement.identity, os.environ)
    except CpulaunchError as e:
        print(f"cpulaunch: this process can't know its rank: {e}; {e.hint}", file=sys.stderr, flush=True)
        return HostError.exit_code
    launcher = os.environ.get(variables.LAUNCHER_PID)
    if placement.agents_are_children and launcher and int(launcher) != os.getppid():
        return 128 + signal.SIGTERM  # the launcher had died before prctl
    return Agent(placement, identity).run(unguard(sys.argv[sys.argv.index("--") + 1 :]))


class Agent:
    """One rank's agent."""

    def __init__(self, placement: Placement, identity: Identity) -> None:
        self.placement, self.identity = placement, identity
        self.name = placement.names.one(identity.rank)
        # The program gets the limit of open files from before cpulaunch raised it.
        self.open_files = int(os.environ.get(variables.OPEN_FILES, set_open_files(None)))
        self.selector = selectors.DefaultSelector()
        self.pipes, self.printer, self.reports = Pipes(self.selector), Printer(identity.rank), Reports()
        self.running: Running | None = None
        self.dumps: Dumps | None = None  # created at the first request
        self.telemetry: Telemetry | None = None  # None if the job has no telemetry
        self.traces: RankTraces | None = None  # created at the first request
        self.ended: Ended | None = None
        self.ended_at = time.monotonic()
        self.kill_at: float | None = None
        self.report_leftovers_at: float | None = None
        self.refused = False  # the program was not started, or was killed because it differs from the plan
        self.released = False
        self.by_launcher = False  # the launcher ended the program
        self.killed = False  # the agent sent SIGKILL
        self.saves_at: list[int] = []  # signals at which the program saves a checkpoint
        self.by_signal = 0  # the first signal, not from the launcher, that ended the program
        self.exiting: tuple[int, float] | None = None  # exit code and time that the program announced
        self.aborting: list[dict[str, Any]] | None = None  # the program's threads when C++ aborted it
        self.unknown: set[str] = set()
        self.printed, self.printed_at = 0, 0.0  # bytes of output, and the time of the last
        self.oom_kills = oom_kills()
        self.signals = signal_pipe((*_TERMINATING, *_FORWARDED, signal.SIGCHLD))
        self.selector.register(self.signals, selectors.EVENT_READ)
        self.period = placement.heartbeat_timeout / BEATS_PER_TIMEOUT
        control, token = os.environ.get(variables.CONTROL), os.environ.get(variables.TOKEN, "")
        self.link: Link | None = None
        if control:
            self.link = Link(control, token, identity.rank, self.selector, placement.heartbeat_timeout)
        self.link_state = LinkState.CONNECTING if control else LinkState.ABSENT

    def run(self, argv: list[str]) -> int:
        """Start the program, wait until it has ended, and return the agent's exit code."""
        streams = self.pipes.open()
        try:
            self.running = start_program(self.placement, self.identity, argv, streams, self.open_files)
            self._send(self.running.message)
            self._start_telemetry(self.running)
        except CpulaunchError as e:
            self._refuse(f"{e}; {e.hint}" if e.hint else str(e))
        finally:
            for fd in streams:
                os.close(fd)
        gc.enable()
        while not self._is_finished():
            self._run_once()
        return self._send_rest()

    def _start_telemetry(self, running: Running) -> None:
        if self.placement.telemetry and self.link:
            from cpulaunch.agent.observe.telemetry import Telemetry
            from cpulaunch.agent.observe.usage import Usage

            usage = Usage(running.program.pid, running.planned.cores, time.monotonic())
            self.telemetry = Telemetry(running.ledger, usage, self.identity.size, self.period)

    def _refuse(self, error: str) -> None:
        self.refused = True
        self.ended = Ended(HostError.exit_code, None)
        self._send(messages.Refused(error))

    # ---- the loop

    def _run_once(self) -> None:
        ready = self.selector.select(self._timeout())
        self._check_program()  # first, as a message may ask to end the program
        for key, mask in ready:
            if key.data is not None:
                for message in key.data.ready(mask):
                    self._handle_message(message)
            elif key.fd == self.signals:
                for number in os.read(self.signals, 512):
                    self._handle_signal(number)
            elif key.fd in self.pipes:
                self._read(key.fd)
        now = time.monotonic()
        if self.link:
            self._check_link(self.link, now)
        if self.dumps:
            self.dumps.check_time()
        self._check_program()
        if self.report_leftovers_at is not None and now >= self.report_leftovers_at:
            self._report_leftovers()
        if self.kill_at is not None and now >= self.kill_at and self.running:
            self.killed = self.killed or not self.ended
            self._kill(self.running)
            self._check_program()
            self.kill_at = None

    def _timeout(self) -> float:
        now = time.monotonic()
        moments = [now + 60]
        if self.link and not self.link.closed:
            moments += self.link.due, self.link.last_sent + self.period
            if self.telemetry:
                moments.append(self.telemetry.due)
        if self.dumps:
            moments.append(self.dumps.due)
        if self.kill_at is not None:
            # No event reports the end of the last orphan, so check ten times a second.
            moments.append(min(self.kill_at, now + 0.1) if self.ended else self.kill_at)
        return max(0.0, min(moments) - now)

    def _check_program(self) -> None:
        if self.running and not self.ended and (ended := self.running.program.poll()):
            self.ended, self.ended_at = ended, time.monotonic()
            # After a success, its children may finish; after a failure, they are killed at once.
            grace = self.placement.grace_period if ended.code == 0 else 0
            self.kill_at = self.ended_at + grace
            if grace > LEFTOVERS_AFTER:
                self.report_leftovers_at = self.ended_at + LEFTOVERS_AFTER

    def _report_leftovers(self) -> None:
        self.report_leftovers_at = None
        leftovers = self.running.program.leftovers() if self.running else []
        if leftovers and self.kill_at is not None:
            names = ", ".join(leftovers[:MAX_LEFTOVERS]) + (", …" if len(leftovers) > MAX_LEFTOVERS else "")
            note = (
                f"{self.name}: the program has ended but left processes running, "
                f"which have {self.placement.grace_period:g} s to exit: {names}"
            )
            self._send(messages.Note(note))

    def _is_finished(self) -> bool:
        return self.ended is not None and not (self.running and self.running.program.has_leftovers())

    # ---- the launcher

    def _check_link(self, link: Link, now: float) -> None:
        link.check_time()
        if self.link_state != link.state:
            self.link_state = link.state
            if link.state is LinkState.LOST:
                self.by_launcher = self.by_launcher or not self.ended
                self._end(signal.SIGTERM, self.placement.grace_period)
            elif link.state is LinkState.ABSENT:
                self._run_unwatched(link)
        if now >= link.last_sent + self.period:
            link.send(self._beat())
        if self.telemetry and now >= self.telemetry.due and (message := self.telemetry.look(now)):
            link.send(message)
        self.pipes.pause(link.pending > MAX_PENDING)

    def _run_unwatched(self, link: Link) -> None:
        address = os.environ[variables.CONTROL]
        warning = (
            f"{UNREACHED} at {address} ({link.why}): the job runs, "
            "but failures, logs and lost hosts are not watched\n"
        )
        self.printer.print(2, warning.encode())
        waiting, link.waiting = link.waiting, []
        for message in waiting:
            self._send(message)

    def _handle_message(self, message: LauncherMessage | Unknown) -> None:
        if isinstance(message, messages.Release):
            self.released = True
        elif isinstance(message, messages.End):
            self.by_launcher = self.by_launcher or not self.ended
            useless = message.failed and message.signal in self.saves_at
            self._end(signal.SIGKILL if useless else message.signal, message.grace)
        elif isinstance(message, messages.AskTime):
            self._send(messages.Time(time.monotonic()))
        elif isinstance(message, messages.AskDump):
            self._dump(message)
        elif isinstance(message, (messages.Trace, messages.SendTrace)):
            self._trace(message)
        elif isinstance(message, messages.AskProgress):
            self._send(self._beat())
        elif isinstance(message, Unknown):
            self._report_unknown("the launcher sent a message", message.kind)

    def _send(self, message: AgentMessage) -> None:
        """Send a message to the launcher.  Without a launcher, print it if it holds text for the user."""
        if self.link and not self.link.closed:
            self.link.send(message)
        elif isinstance(message, messages.Output):
            self.printer.print(message.stream, wire.unpack(message.data))
        elif isinstance(message, messages.Refused):
            self.printer.print(2, f"cpulaunch: {message.error}\n".encode())
        elif isinstance(message, messages.Note):
            self.printer.print(2, f"cpulaunch: {message.note}\n".encode())

    def _beat(self) -> messages.Beat:
        mapped = self.running.ledger if self.running else None
        progress = ledger.progress(mapped) if mapped else None
        steps, collectives, at, gap, waiting, expects = progress or ledger.NONE
        leaving = self.exiting is not None
        last = max(at / 1e9, self.printed_at, self.exiting[1] if self.exiting else 0.0) or None
        since = ledger.waits_since(mapped) / 1e9 if mapped else 0.0
        done = steps, collectives, gap / 1e9, waiting / 1e9, expects, self.printed, last
        return messages.Beat(*done, progress is not None, since or None, leaving)

    def _report_unknown(self, what: str, kind: str) -> None:
        if what not in self.unknown:
            self.unknown.add(what)
            self._send(messages.Note(f"{self.name}: {what} of an unknown kind, {kind!r}"))

    def _dump(self, message: messages.AskDump) -> None:
        if self.dumps is None:
            from cpulaunch.agent.observe.dump import Dumps

            self.dumps = Dumps(self.selector, self.running, self._send)
        self.dumps.ask(message)

    def _trace(self, message: messages.Trace | messages.SendTrace) -> None:
        if self.traces is None:
            from cpulaunch.agent.observe.traces import RankTraces

            self.traces = RankTraces(self.running, self._send)
        if isinstance(message, messages.SendTrace):
            self.traces.send(message)
        else:
            self.traces.ask(message)
            if self.ended:
                self.traces.program_ended()

    # ---- the program

    def _read(self, fd: int) -> None:
        stream, data = self.pipes.read(fd)
        if stream == REPORTS:
            for report in self.reports.feed(data):
                self._handle_report(report)
        elif data:
            self.printed, self.printed_at = self.printed + len(data), time.monotonic()
            self._send(messages.Output(stream, wire.pack(data)))

    def _handle_report(self, report: Report | Unknown) -> None:
        if isinstance(report, messages.Raised):
            self._send(messages.Failure(*report, time.monotonic(), self.by_launcher, self._unfinished()))
        elif isinstance(report, messages.Aborts):
            self.aborting = report.threads
        elif isinstance(report, messages.Leaving):
            if not self.by_launcher:
                self.exiting = report.code, time.monotonic()
        elif isinstance(report, messages.Resumes):
            self._send(messages.Resumed(report.step))
        elif isinstance(report, messages.Saves):
            self._send(messages.Saved(*report))
        elif isinstance(report, messages.SavesAt):
            self.saves_at = report.signals
        elif isinstance(report, (messages.Traces, messages.HasTraced)):
            if self.traces:
                self.traces.reported(report)
        elif isinstance(report, Unknown):
            self._report_unknown("the program reported something", report.kind)
        elif self.running and not self.ended:
            self._verify(self.running, report)

    def _unfinished(self) -> list[dict[str, Any]]:
        return ledger_file.groups(self.running and self.running.ledger, unfinished=True)

    def _verify(self, running: Running, report: messages.Ready | messages.Torch) -> None:
        from cpulaunch.agent.observe.verification import at_start, with_torch

        pid, planned = running.program.pid, running.planned
        if isinstance(report, messages.Ready):
            found, complaints = at_start(pid, report, planned)
        else:
            found, complaints = with_torch(pid, report, planned)
        self._send(found)
        for complaint in complaints:
            note = f"{self.name} {complaint}"
            if not self.placement.lenient:
                self._kill(running)
                self._refuse(f"{note}; --lenient makes this a warning")
                return
            self._send(messages.Note(note))

    def _handle_signal(self, number: int) -> None:
        if number in _FORWARDED:
            if self.running and not self.ended:
                self.running.program.signal_group(number)
        elif number in _TERMINATING:
            if not self.ended:
                self.by_signal = self.by_signal or number
            self._end(number, self.placement.grace_period)

    def _end(self, number: int, grace: float) -> None:
        if not self.running or self.ended:
            if number == signal.SIGKILL:
                self.kill_at = time.monotonic()
            return
        if number == signal.SIGINT and self._is_in_rendezvous(self.running):
            number = signal.SIGTERM  # Python can't raise KeyboardInterrupt while torch waits in C++
        deadline = time.monotonic() + (0 if number == signal.SIGKILL else grace)
        self.kill_at = deadline if self.kill_at is None else min(self.kill_at, deadline)
        self.killed = self.killed or number == signal.SIGKILL
        self.running.program.signal_group(number)
        self.running.program.signal_group(signal.SIGCONT)  # a stopped process gets signals once it continues

    def _is_in_rendezvous(self, running: Running) -> bool:
        """Whether the program waits for the other ranks in ``init_process_group``."""
        groups = ledger.groups(running.ledger) if running.ledger else ()
        return any(each.kind == ledger.MEETING for group in groups for each in group.operations)

    def _kill(self, running: Running) -> None:
        for failure in running.program.kill():
            self._send(messages.Note(f"{self.name}: {failure}"))

    # ---- the end

    def _send_rest(self) -> int:
        """Send the rest of the output and the exit status, wait for the release, and return the exit code."""
        assert self.ended is not None
        self.pipes.pause(False)
        for _ in range(FULL_PIPE // MAX_OUTPUT + 1):  # limited, as other processes may keep writing
            for fd in self.pipes.ready():
                self._read(fd)
        self.pipes.forget()
        if self.traces:
            self.traces.program_ended()
        if self.running and not self.refused:
            if self.telemetry and (message := self.telemetry.last()):
                self._send(message)
            self._send(self._beat())  # the final progress
            self._send(self._exit_message(self.running, self.ended))
        # Wait even for a slow or stopped launcher; if the launcher is gone, the link closes.
        while self.link and not self.link.closed and not (self.released and not self._is_sending_trace):
            self._run_once()
        if self.traces:
            self.traces.drop()
        self.printer.finish()
        if self.link and self.link.cut_off and self.placement.daemon_outlives_link:
            os.kill(os.getppid(), signal.SIGTERM)  # else the MPI's daemon would wait for its mpiexec forever
        # The launcher already has the exit status, so mpiexec shouldn't report a failure too.
        return 0 if self.released else self.ended.shell_code

    @property
    def _is_sending_trace(self) -> bool:
        return self.traces is not None and self.traces.sending

    def _exit_message(self, running: Running, ended: Ended) -> messages.Exit:
        code, number, at, by_launcher = *ended, self.ended_at, self.by_launcher
        finished = False
        if self.exiting and (by_launcher or (number is None and code == self.exiting[0])):
            # Use the time of the announcement, as peers see closed connections while the program exits.
            (code, at), number, finished = self.exiting, None, True
        if number == signal.SIGKILL and not self.killed:
            # Neither the agent nor the launcher killed it.  The launcher's request to end the job may have
            # arrived first, because peers saw the connections close.
            by_launcher = False
        cause = None
        if self.by_signal and not by_launcher:
            cause = Cause(Kind.AGENT_SIGNALED, signal=self.by_signal)
        elif number == signal.SIGKILL and not by_launcher:
            cause = why_killed(running.program.pid, self.oom_kills)
        unexplained = self.placement.python and self.exiting is None
        groups = None
        if finished or not by_launcher:
            groups = self._unfinished() if number else ledger_file.last_calls(running.ledger)
        threads = self.aborting if number == signal.SIGABRT and not by_launcher else None
        document = cause and cause.document()
        return messages.Exit(
            code, number, at, by_launcher, self.by_signal, document, unexplained, groups, threads, finished
        )
