"""A spawner.  It starts the agents of its host, starts spawners on other hosts by ssh, and waits for all."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
from collections.abc import Mapping
from typing import Any

from cpulaunch import variables
from cpulaunch.agent.launch.child import set_open_files, signal_pipe
from cpulaunch.agent.output import pass_on
from cpulaunch.agent.spawner import messages
from cpulaunch.agent.spawner.agents import Agents, Input
from cpulaunch.agent.spawner.connection import PIECE, STDERR, STDIN, STDOUT, Connection
from cpulaunch.agent.spawner.messages import FAN_OUT, MARK, TO_CHILD, Host, Start, decode, encode, split_hosts
from cpulaunch.errors import HostError
from cpulaunch.wire import Lines, MessageError, pack, unpack

FAILED = "cpulaunch: ssh: "
"""The prefix of a line on stderr about a host without agents: JSON with ``host`` and ``why``."""

LOST_CODE = 255
"""The exit code if the connection to a host is lost while no launcher watches the job.  It is ssh's own."""

REACH_TIMEOUT = 5.0
"""Seconds within which the launcher's port must accept a connection."""

_TERMINATING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Spawner:
    """The spawner of one host, with its connections to the spawners that it has started.

    `RootSpawner` handles the reports of all hosts itself; `ChildSpawner` passes them to its parent.
    """

    def __init__(self, start: Start, environ: Mapping[str, str], mine: Host | None) -> None:
        """``environ`` is the agents' environment.  ``mine`` is our own host, or None if it has no ranks."""
        hosts = [Host(*row) for row in start.hosts]
        self.start, self.environ = start, environ
        self.selector = selectors.DefaultSelector()
        self.waiting = {host.name: host for host in hosts}  # hosts that haven't ended
        self.queue = split_hosts([host for host in hosts if host != mine])
        self.running: set[str] = set()  # hosts whose spawner has started
        self.connections: dict[int, Connection] = {}  # by the pid of ssh
        self.ending = False
        self.watched = variables.CONTROL in environ
        self.mine = mine
        open_files = set_open_files(None)
        self.agents = Agents(mine, start.agent, start.size, open_files) if mine else None
        self.signals = signal_pipe((*_TERMINATING, signal.SIGCHLD))
        self.selector.register(self.signals, selectors.EVENT_READ, self._handle_signals)

    def report(self, message: Any) -> None:
        """Handle a message of TO_PARENT about a host."""
        raise NotImplementedError

    def report_unstarted(self, hosts: list[Host], why: str) -> None:
        """Handle ``hosts`` whose agents were not started, for example because the first is unreachable."""
        raise NotImplementedError

    def start_agents(self, reader_stdin: int = STDIN) -> None:
        """Start the agents of this host, if it has ranks.

        Call ``connect`` first, because ssh takes longer.
        """
        if self.agents is None or self.mine is None:
            return
        self._handle(messages.Started(self.mine.name))
        try:
            self.agents.start(self.environ, self.start.reader, reader_stdin)
        except OSError as e:
            self.agents.signal(signal.SIGKILL)
            why = f"{self.start.agent[0]}: {e.strerror or e}"
            self._handle(messages.NotStarted(list(self.mine), why))

    def wait(self) -> None:
        while self.waiting:
            for key, _ in self.selector.select():
                current = self.selector.get_map().get(key.fd)
                if current is None or current.data is not key.data:
                    continue  # an earlier event has closed it
                if isinstance(key.data, Connection):
                    for message in key.data.ready(key.fd):
                        self._handle(message, key.data)
                else:
                    key.data()
            self.connect()

    # ---- other hosts

    def connect(self) -> None:
        """Connect to queued hosts, while fewer than FAN_OUT connections are being made."""
        patience = {
            name: value for name, value in self.environ.items() if name == variables.HEARTBEAT_TIMEOUT
        }
        while self.queue:
            if sum(not connection.started for connection in self.connections.values()) >= FAN_OUT:
                return
            hosts = self.queue.pop(0)
            try:
                connection = Connection(hosts, self.start, {**os.environ, **patience}, self.selector)
            except OSError as e:
                self.report_unstarted(hosts, f"ssh can't be started: {e.strerror or e}")
            else:
                self.connections[connection.pid] = connection

    def _handle(self, message: Any, source: Connection | None = None) -> None:
        """Handle a message from the connection ``source``, or about our own host if it is None."""
        self.watched = self.watched and not (source and source.unwatched)
        if isinstance(message, messages.Started):
            self.running.add(message.host)
            if source and message.host == source.hosts[0].name:
                source.mark_started()
        elif isinstance(message, messages.Ended):
            self.waiting.pop(message.host, None)
        elif isinstance(message, messages.NotStarted):
            self.waiting.pop(Host(*message.host).name, None)
        elif isinstance(message, messages.Unreached) and source:
            unreached = Host(*message.host)  # RootSpawner will connect to it
            source.hosts = [host for host in source.hosts if host != unreached]
        self.report(message)

    def _handle_lost_connection(self, connection: Connection, code: int) -> None:
        for message in connection.end():
            self._handle(message, connection)
        unfinished = [host for host in connection.hosts if host.name in self.waiting]
        if not connection.started:
            if unfinished:
                self.report_unstarted(unfinished, connection.why(code))
            return
        if unknown := [host for host in unfinished if host.name not in self.running]:
            self.report_unstarted(unknown, f"the connection to {connection.hosts[0].name} was lost")
        for host in unfinished:
            if host.name in self.running:
                self.report(messages.Lost(host.name))

    # ---- the end

    def end(self, number: int) -> None:
        """Signal all agents on all hosts, and start no more agents.  A second call sends SIGKILL."""
        if self.ending:
            number = signal.SIGKILL
        self.ending = True
        groups, self.queue = self.queue, []
        for hosts in groups:
            self.report_unstarted(hosts, "the job has ended before")
        if self.agents:
            self.agents.signal(number)
        for connection in self.connections.values():
            connection.send(messages.End(int(number)))
            if number == signal.SIGKILL and not connection.started:
                os.kill(connection.pid, signal.SIGTERM)

    def _handle_signals(self) -> None:
        for number in set(os.read(self.signals, 512)):
            if number == signal.SIGCHLD:
                self._reap()
            else:
                self.end(number)

    def _handle_agent_exit(self, agents: Agents, host: str, code: int) -> None:
        if host not in self.waiting:
            return  # the host has been reported as NotStarted
        if (first_code := agents.exit_code) is not None:
            self._handle(messages.Ended(host, first_code))
        elif code:
            self._handle(messages.Failed(host, code))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if self.agents and self.mine and pid in self.agents:
                self._handle_agent_exit(self.agents, self.mine.name, self.agents.record_exit(pid, status))
            elif connection := self.connections.pop(pid, None):
                self._handle_lost_connection(connection, os.waitstatus_to_exitcode(status))


class RootSpawner(Spawner):
    """The spawner on the launching host.  It retries hosts that other spawners could not reach.

    ``exit_code`` is the code of the first host that failed, or 128 + the signal that ended the spawner.
    """

    def __init__(self, start: Start, environ: Mapping[str, str]) -> None:
        super().__init__(start, environ, next((Host(*row) for row in start.hosts if row[-1]), None))
        self.exit_code = 0
        self._is_stopping = False
        self._lost: set[str] = set()
        self._input: Connection | None = None  # the connection to the rank that reads our stdin

    def run(self) -> int:
        self.connect()
        self.start_agents()
        self.wait()
        return self.exit_code

    def _handle(self, message: Any, source: Connection | None = None) -> None:
        if isinstance(message, messages.InputWanted):
            self._input = source
            self._wait_for_input()
        else:
            super()._handle(message, source)

    def report(self, message: Any) -> None:
        if isinstance(message, messages.Ended | messages.Failed):
            self._record_failure(message.code)
        elif isinstance(message, messages.Lost):
            self._handle_loss(message.host)
        elif isinstance(message, messages.NotStarted):
            self.report_unstarted([Host(*message.host)], message.why)
        elif isinstance(message, messages.Unreached):
            host = Host(*message.host)
            if self._is_stopping:
                self.waiting.pop(host.name, None)
            else:
                self.queue.append([host])

    def report_unstarted(self, hosts: list[Host], why: str) -> None:
        self._is_stopping = True
        groups, self.queue = self.queue, []
        for host in (*hosts, *(host for group in groups for host in group)):
            self.waiting.pop(host.name, None)
        if not self.ending:
            pass_on(STDERR, f"{FAILED}{json.dumps({'host': hosts[0].name, 'why': why})}\n".encode())
            self._record_failure(HostError.exit_code)

    def end(self, number: int) -> None:
        self.exit_code = self.exit_code or 128 + number
        self._is_stopping = True
        super().end(number)
        for name in self._lost:
            self.waiting.pop(name, None)

    def _record_failure(self, code: int) -> None:
        self.exit_code = self.exit_code or code
        if code and not self.watched and not self.ending:
            self.end(signal.SIGTERM)  # else the other ranks would wait for the failed one

    def _handle_loss(self, name: str) -> None:
        """Handle the loss of the connection to a host.

        If a launcher watches the job, the host's agents may continue, and the launcher ends this spawner
        after them.  Otherwise the job has failed.
        """
        self._lost.add(name)
        if not self.watched or self.ending:
            self.waiting.pop(name, None)
            self._record_failure(LOST_CODE)

    def _wait_for_input(self) -> None:
        try:
            self.selector.register(STDIN, selectors.EVENT_READ, self._send_input)
        except PermissionError:  # epoll refuses regular files and /dev/null, which are always ready
            self._send_input()

    def _send_input(self) -> None:
        if STDIN in self.selector.get_map():
            self.selector.unregister(STDIN)
        data = os.read(STDIN, PIECE)
        if self._input:
            self._input.send(messages.Input(pack(data) if data else None))


class ChildSpawner(Spawner):
    """A spawner that another spawner, its parent, has started by ssh.

    Its stdin and stdout are connected to the parent.
    """

    def __init__(self, start: Start, environ: Mapping[str, str]) -> None:
        super().__init__(start, environ, Host(*start.hosts[0]))
        self._lines = Lines(limit=1 << 40)
        self._input: Input | None = None  # the pipe to the reader, if it runs on this host
        self._reader: Connection | None = None  # the connection to the reader, if it runs elsewhere

    def run(self, received: bytes) -> int:
        """Run until all hosts have ended.  ``received`` is the input that follows the ``Start`` message."""
        self.connect()
        if self.mine and self.start.reader - self.mine.first in range(self.mine.ranks):
            self._input = Input(self.selector, self._request_input)
            self.start_agents(self._input.end)
            os.close(self._input.end)
            self._request_input()
        else:
            self.start_agents()
        self.selector.register(STDIN, selectors.EVENT_READ, self._read_parent)
        self._handle_lines(received)
        self.wait()
        return 0

    def _handle(self, message: Any, source: Connection | None = None) -> None:
        if isinstance(message, messages.InputWanted):
            self._reader = source
        super()._handle(message, source)

    def report(self, message: Any) -> None:
        if isinstance(message, messages.Unreached):
            self.waiting.pop(Host(*message.host).name, None)
        elif isinstance(message, messages.Lost):
            self.waiting.pop(message.host, None)
        pass_on(STDOUT, MARK + encode(message))

    def report_unstarted(self, hosts: list[Host], why: str) -> None:
        for host in hosts:
            self.report(messages.Unreached(list(host), why))

    def _request_input(self) -> None:
        self.report(messages.InputWanted())

    def _read_parent(self) -> None:
        try:
            data = os.read(STDIN, PIECE)
        except OSError:
            data = b""
        if data:
            self._handle_lines(data)
            return
        self.selector.unregister(STDIN)
        if self._input:
            self._input.close()
        if not self._launcher_answers():
            self.end(signal.SIGTERM)

    def _handle_lines(self, data: bytes) -> None:
        for line in self._lines.feed(data):
            try:
                message = decode(line, TO_CHILD)
            except MessageError:
                continue
            if isinstance(message, messages.End):
                self.end(message.signal)
            elif isinstance(message, messages.Input) and self._input:
                self._input.write(unpack(message.data or ""))
            elif isinstance(message, messages.Input) and self._reader:
                self._reader.send(message)

    def _launcher_answers(self) -> bool:
        """Whether the launcher's port still accepts connections."""
        host, _, port = self.environ.get(variables.CONTROL, "").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT).close()
        except (OSError, ValueError):
            return False
        return True
