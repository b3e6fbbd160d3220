"""The agent: the parent process of one rank's program.

It finds out which rank it is, sets the program's cores and environment, and starts it.  Then it sends the
program's output and exit status to the launcher, forwards signals, and ends the program if the launcher is
gone.  It imports only the standard library, so that an agent takes a few megabytes, and starts in a few
milliseconds.
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
"""Bytes that may wait to be sent to the launcher before the agent stops reading the program's output."""

MANY_LEFT = 3
"""How many of the processes that an ended program left running are named."""

LINGERING = 1.0
"""Seconds after the program's end until the user is told which of its processes still run."""

FULL_PIPE = 1 << 20
"""The largest capacity of a pipe in bytes, for users other than root (pipe(7))."""

_HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
        return 128 + signal.SIGTERM  # the launcher had died before we asked to die with it
    return Agent(placement, identity).run(unguard(sys.argv[sys.argv.index("--") + 1 :]))


class Agent:
    """One rank's agent."""

    def __init__(self, placement: Placement, identity: Identity) -> None:
        self.placement, self.identity = placement, identity
        self.name = placement.names.one(identity.rank)
        # The program gets the limit of open files that was in force before cpulaunch raised it.
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
        self.tell_of_left_at: float | None = None
        self.refused = False  # the program was not started, or was killed because it differs from the plan
        self.released = False
        self.by_launcher = False  # the launcher ended the program
        self.killed = False  # the agent sent SIGKILL
        self.saves_at: list[int] = []  # signals at which the program saves a checkpoint
        self.by_signal = 0  # the first signal by which somebody else ended the program
        self.exiting: tuple[int, float] | None = None  # exit code and time that the program announced
        self.aborting: list[dict[str, Any]] | None = None  # the program's threads when C++ aborted it
        self.unknown: set[str] = set()
        self.printed, self.printed_at = 0, 0.0  # bytes that the program has printed, and when it last printed
        self.oom_kills = oom_kills()
        self.signals = signal_pipe((*_ENDING, *_HANDED_ON, signal.SIGCHLD))
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
            self._tell(self.running.message)
            self._watch_steps(self.running)
        except CpulaunchError as e:
            self._refuse(f"{e}; {e.hint}" if e.hint else str(e))
        finally:
            for fd in streams:
                os.close(fd)
        gc.enable()
        while not self._finished():
            self._turn()
        return self._leave()

    def _watch_steps(self, running: Running) -> None:
        if self.placement.telemetry and self.link:
            from cpulaunch.agent.observe.telemetry import Telemetry
            from cpulaunch.agent.observe.usage import Usage

            usage = Usage(running.program.pid, running.planned.cores, time.monotonic())
            self.telemetry = Telemetry(running.ledger, usage, self.identity.size, self.period)

    def _refuse(self, error: str) -> None:
        self.refused = True
        self.ended = Ended(HostError.exit_code, None)
        self._tell(messages.Refused(error))

    # ---- the loop

    def _turn(self) -> None:
        ready = self.selector.select(self._timeout())
        self._look_at_program()  # before a message that should end it
        for key, mask in ready:
            if key.data is not None:
                for message in key.data.ready(mask):
                    self._obey(message)
            elif key.fd == self.signals:
                for number in os.read(self.signals, 512):
                    self._signaled(number)
            elif key.fd in self.pipes:
                self._read(key.fd)
        now = time.monotonic()
        if self.link:
            self._look_after(self.link, now)
        if self.dumps:
            self.dumps.check_time()
        self._look_at_program()
        if self.tell_of_left_at is not None and now >= self.tell_of_left_at:
            self._tell_of_left()
        if self.kill_at is not None and now >= self.kill_at and self.running:
            self.killed = self.killed or not self.ended
            self._kill(self.running)
            self._look_at_program()
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
            # No event reports that the last orphans have ended, so check ten times a second.
            moments.append(min(self.kill_at, now + 0.1) if self.ended else self.kill_at)
        return max(0.0, min(moments) - now)

    def _look_at_program(self) -> None:
        if self.running and not self.ended and (ended := self.running.program.poll()):
            self.ended, self.ended_at = ended, time.monotonic()
            # Its children may finish after a success, but are killed at once after a failure.
            grace = self.placement.grace_period if ended.code == 0 else 0
            self.kill_at = self.ended_at + grace
            if grace > LINGERING:
                self.tell_of_left_at = self.ended_at + LINGERING

    def _tell_of_left(self) -> None:
        self.tell_of_left_at = None
        left = self.running.program.left() if self.running else []
        if left and self.kill_at is not None:
            names = ", ".join(left[:MANY_LEFT]) + (", …" if len(left) > MANY_LEFT else "")
            note = (
                f"{self.name}: the program has ended but left processes running, "
                f"which have {self.placement.grace_period:g} s to exit: {names}"
            )
            self._tell(messages.Note(note))

    def _finished(self) -> bool:
        return self.ended is not None and not (self.running and self.running.program.left_behind())

    # ---- the launcher

    def _look_after(self, link: Link, now: float) -> None:
        link.check_time()
        if self.link_state != link.state:
            self.link_state = link.state
            if link.state is LinkState.LOST:
                self.by_launcher = self.by_launcher or not self.ended
                self._end(signal.SIGTERM, self.placement.grace_period)
            elif link.state is LinkState.ABSENT:
                self._go_on_alone(link)
        if now >= link.last_sent + self.period:
            link.send(self._beat())
        if self.telemetry and now >= self.telemetry.due and (said := self.telemetry.look(now)):
            link.send(said)
        self.pipes.pause(link.pending > MAX_PENDING)

    def _go_on_alone(self, link: Link) -> None:
        address = os.environ[variables.CONTROL]
        warning = (
            f"{UNREACHED} at {address} ({link.why}): the job runs, "
            "but failures, logs and lost hosts are not watched\n"
        )
        self.printer.print(2, warning.encode())
        waiting, link.waiting = link.waiting, []
        for message in waiting:
            self._tell(message)

    def _obey(self, message: LauncherMessage | Unknown) -> None:
        if isinstance(message, messages.Release):
            self.released = True
        elif isinstance(message, messages.End):
            self.by_launcher = self.by_launcher or not self.ended
            useless = message.failed and message.signal in self.saves_at
            self._end(signal.SIGKILL if useless else message.signal, message.grace)
        elif isinstance(message, messages.AskTime):
            self._tell(messages.Time(time.monotonic()))
        elif isinstance(message, messages.AskDump):
            self._dump(message)
        elif isinstance(message, (messages.Trace, messages.SendTrace)):
            self._trace(message)
        elif isinstance(message, messages.AskProgress):
            self._tell(self._beat())
        elif isinstance(message, Unknown):
            self._unknown("the launcher sent a message", message.kind)

    def _tell(self, message: AgentMessage) -> None:
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
        kept = self.running.ledger if self.running else None
        progress = ledger.progress(kept) if kept else None
        steps, collectives, at, gap, waiting, expects = progress or ledger.NONE
        leaving = self.exiting is not None
        last = max(at / 1e9, self.printed_at, self.exiting[1] if self.exiting else 0.0) or None
        since = ledger.waits_since(kept) / 1e9 if kept else 0.0
        done = steps, collectives, gap / 1e9, waiting / 1e9, expects, self.printed, last
        return messages.Beat(*done, progress is not None, since or None, leaving)

    def _unknown(self, what: str, kind: str) -> None:
        if what not in self.unknown:
            self.unknown.add(what)
            self._tell(messages.Note(f"{self.name}: {what} of an unknown kind, {kind!r}"))

    def _dump(self, message: messages.AskDump) -> None:
        if self.dumps is None:
            from cpulaunch.agent.observe.dump import Dumps

            self.dumps = Dumps(self.selector, self.running, self._tell)
        self.dumps.ask(message)

    def _trace(self, message: messages.Trace | messages.SendTrace) -> None:
        if self.traces is None:
            from cpulaunch.agent.observe.traces import RankTraces

            self.traces = RankTraces(self.running, self._tell)
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
                self._reported(report)
        elif data:
            self.printed, self.printed_at = self.printed + len(data), time.monotonic()
            self._tell(messages.Output(stream, wire.pack(data)))

    def _reported(self, report: Report | Unknown) -> None:
        if isinstance(report, messages.Raised):
            self._tell(messages.Failure(*report, time.monotonic(), self.by_launcher, self._unfinished()))
        elif isinstance(report, messages.Aborts):
            self.aborting = report.threads
        elif isinstance(report, messages.Leaving):
            if not self.by_launcher:
                self.exiting = report.code, time.monotonic()
        elif isinstance(report, messages.Resumes):
            self._tell(messages.Resumed(report.step))
        elif isinstance(report, messages.Saves):
            self._tell(messages.Saved(*report))
        elif isinstance(report, messages.SavesAt):
            self.saves_at = report.signals
        elif isinstance(report, (messages.Traces, messages.HasTraced)):
            if self.traces:
                self.traces.reported(report)
        elif isinstance(report, Unknown):
            self._unknown("the program reported something", report.kind)
        elif self.running and not self.ended:
            self._verify(self.running, report)

    def _unfinished(self) -> list[dict[str, Any]]:
        return ledger_file.groups(self.running and self.running.ledger, unfinished=True)

    def _verify(self, running: Running, report: messages.Ready | messages.Torch) -> None:
        from cpulaunch.agent.observe.verification import at_start, with_torch

        look_at, planned = running.program.pid, running.planned
        if isinstance(report, messages.Ready):
            found, complaints = at_start(look_at, report, planned)
        else:
            found, complaints = with_torch(look_at, report, planned)
        self._tell(found)
        for complaint in complaints:
            note = f"{self.name} {complaint}"
            if not self.placement.lenient:
                self._kill(running)
                self._refuse(f"{note}; --lenient makes this a warning")
                return
            self._tell(messages.Note(note))

    def _signaled(self, number: int) -> None:
        if number in _HANDED_ON:
            if self.running and not self.ended:
                self.running.program.signal_group(number)
        elif number in _ENDING:
            if not self.ended:
                self.by_signal = self.by_signal or number
            self._end(number, self.placement.grace_period)

    def _end(self, number: int, grace: float) -> None:
        if not self.running or self.ended:
            if number == signal.SIGKILL:
                self.kill_at = time.monotonic()
            return
        if number == signal.SIGINT and self._meets_others(self.running):
            number = signal.SIGTERM  # torch waits in C++, where Python can't raise KeyboardInterrupt
        deadline = time.monotonic() + (0 if number == signal.SIGKILL else grace)
        self.kill_at = deadline if self.kill_at is None else min(self.kill_at, deadline)
        self.killed = self.killed or number == signal.SIGKILL
        self.running.program.signal_group(number)
        self.running.program.signal_group(signal.SIGCONT)  # a stopped process gets it once it continues

    def _meets_others(self, running: Running) -> bool:
        """Whether the program waits for the other ranks in ``init_process_group``."""
        groups = ledger.groups(running.ledger) if running.ledger else ()
        return any(each.kind == ledger.MEETING for group in groups for each in group.operations)

    def _kill(self, running: Running) -> None:
        for left in running.program.kill():
            self._tell(messages.Note(f"{self.name}: {left}"))

    # ---- the end

    def _leave(self) -> int:
        """Send the rest of the output and the exit status, wait for the release, and return the exit code."""
        assert self.ended is not None
        self.pipes.pause(False)
        for _ in range(FULL_PIPE // MAX_OUTPUT + 1):  # a limit, as other processes may still write
            for fd in self.pipes.ready():
                self._read(fd)
        self.pipes.forget()
        if self.traces:
            self.traces.program_ended()
        if self.running and not self.refused:
            if self.telemetry and (said := self.telemetry.last()):
                self._tell(said)
            self._tell(self._beat())  # the final progress
            self._tell(self._exit(self.running, self.ended))
        # A slow or stopped launcher will read it later; if the launcher is gone, the link closes.
        while self.link and not self.link.closed and not (self.released and not self._sends_a_trace):
            self._turn()
        if self.traces:
            self.traces.drop()
        self.printer.finish()
        if self.link and self.link.cut_off and self.placement.daemon_outlives_link:
            os.kill(os.getppid(), signal.SIGTERM)  # the MPI's daemon would never stop waiting for its mpiexec
        # The launcher has the exit status already, so mpiexec need not report a failure as well.
        return 0 if self.released else self.ended.shell_code

    @property
    def _sends_a_trace(self) -> bool:
        return self.traces is not None and self.traces.sending

    def _exit(self, running: Running, ended: Ended) -> messages.Exit:
        code, number, at, by_launcher = *ended, self.ended_at, self.by_launcher
        finished = False
        if self.exiting and (by_launcher or (number is None and code == self.exiting[0])):
            # Count the time of the announcement: peers see closed connections while the program ends.
            (code, at), number, finished = self.exiting, None, True
        if number == signal.SIGKILL and not self.killed:
            # Somebody else killed it.  Its peers may see closed connections, and the launcher end the job,
            # before we see this end.
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
        said = cause and cause.document()
        return messages.Exit(
            code, number, at, by_launcher, self.by_signal, said, unexplained, groups, threads, finished
        )
