"""A connection to another host: an ssh process, and the messages that it carries."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from cpulaunch import variables
from cpulaunch.agent.launch.child import die_with, fork_and_exec
from cpulaunch.agent.output import pass_on
from cpulaunch.agent.spawner.messages import MARK, TO_PARENT, Host, Start, decode, encode
from cpulaunch.messages import UNREACHED
from cpulaunch.wire import MAX_LINE, MessageError

STDIN, STDOUT, STDERR = 0, 1, 2

PIECE = 1 << 16
"""The largest number of bytes read or written at once."""


class Connection:
    """An ssh process that runs a spawner on the first of ``hosts``.

    This spawner starts the agents of its own host, and connects to the other ``hosts``.  ``started`` says
    that it runs, and ``unwatched`` that some agents can't reach the launcher.  ``pid`` is the pid of ssh.
    """

    def __init__(
        self, hosts: list[Host], start: Start, environ: Mapping[str, str], selector: selectors.BaseSelector
    ) -> None:
        """Start ssh.  Raises OSError if that fails."""
        self.hosts, self.started, self.unwatched = hosts, False, False
        self._selector = selector
        self._outgoing = bytearray(encode(start._replace(hosts=[list(host) for host in hosts])))
        self._rest = b""  # an incomplete line of its stdout
        self._errors = b""  # its stderr until the spawner has started
        pipes = [os.pipe() for _ in (STDIN, STDOUT, STDERR)]
        theirs = [pipes[STDIN][0], pipes[STDOUT][1], pipes[STDERR][1]]
        self._ours = {pipes[STDIN][1]: STDIN, pipes[STDOUT][0]: STDOUT, pipes[STDERR][0]: STDERR}

        spawner = os.getpid()

        def prepare() -> None:
            die_with(spawner, signal.SIGTERM)
            for number, fd in enumerate(theirs):
                os.dup2(fd, number)

        # ssh may leave a master connection running.  Without our variables, it isn't killed with the job.
        env = {
            name: value
            for name, value in environ.items()
            if not name.startswith("CPULAUNCH_") or name == variables.HEARTBEAT_TIMEOUT
        }
        try:
            self.pid = fork_and_exec([*start.ssh, hosts[0].name, start.remote], env, prepare)
        except OSError:
            for fd in self._ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        for fd, number in self._ours.items():
            os.set_blocking(fd, False)
            event = selectors.EVENT_WRITE if number == STDIN else selectors.EVENT_READ
            selector.register(fd, event, self)

    def send(self, message: Any) -> None:
        """Queue a message, and send it once the pipe has room.  Drop it if the connection is lost."""
        self._outgoing += encode(message)
        for fd, number in self._ours.items():
            if number == STDIN and fd not in self._selector.get_map():
                self._selector.register(fd, selectors.EVENT_WRITE, self)

    def ready(self, fd: int) -> Iterator[Any]:
        """Read or write a descriptor that is ready, and yield the messages received."""
        if self._ours[fd] == STDIN:
            self._write(fd)
        elif data := self._read(fd):
            yield from self._handle_output(fd, data)
        elif data == b"":
            self._close(fd)

    def end(self) -> Iterator[Any]:
        """Yield the last messages after ssh has ended, and close its pipes.

        Don't wait for the end of the pipes, as a master connection may hold them open.
        """
        for fd, number in list(self._ours.items()):
            while number != STDIN and (data := self._read(fd)):
                yield from self._handle_output(fd, data)
            self._close(fd)
        if self.started:
            pass_on(STDOUT, self._rest)

    def why(self, code: int) -> str:
        """The reason why ssh ended with this exit code before the spawner started: ssh's last line."""
        lines = self._errors.decode(errors="replace").split("\n")
        errors = [line.strip().removeprefix("ssh: ") for line in lines if line.strip()]
        return errors[-1] if errors else f"ssh ended with code {code}"

    def mark_started(self) -> None:
        """Record that the spawner runs.  From now on, its output is the agents' output."""
        self.started = True
        pass_on(STDERR, self._errors)
        self._errors = b""

    def _read(self, fd: int) -> bytes | None:
        """Read data: empty at the end of the pipe, None if no data has arrived."""
        try:
            return os.read(fd, PIECE)
        except BlockingIOError:
            return None

    def _handle_output(self, fd: int, data: bytes) -> Iterator[Any]:
        if self._ours[fd] == STDOUT:
            yield from self._parse(data)
        elif self.started:
            self.unwatched = self.unwatched or UNREACHED.encode() in data
            pass_on(STDERR, data)
        else:
            self._errors = (self._errors + data)[-PIECE:]

    def _parse(self, data: bytes) -> Iterator[Any]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text, mark, rest = line.partition(MARK)
            message = None
            if mark:
                try:
                    message = decode(rest, TO_PARENT)
                except MessageError:  # a program has printed MARK
                    text = line
            if self.started and (text or not mark):
                pass_on(STDOUT, text + b"\n")
            if message is not None:  # messages without fields are falsy
                yield message
        if len(self._rest) > MAX_LINE:
            pass_on(STDOUT, self._rest)
            self._rest = b""

    def _write(self, fd: int) -> None:
        try:
            del self._outgoing[: os.write(fd, self._outgoing[:PIECE])]
        except BlockingIOError:
            return
        except OSError:  # ssh is about to end
            self._close(fd)
            return
        if not self._outgoing:
            self._selector.unregister(fd)

    def _close(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
        os.close(fd)
        del self._ours[fd]
