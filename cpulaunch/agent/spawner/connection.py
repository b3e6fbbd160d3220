"""A connection to another host: the process of ssh, and the messages that it carries."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from cpulaunch.agent.launch.child import die_with, fork_and_exec
from cpulaunch.agent.spawner.messages import MARK, TO_PARENT, Host, Start, decode, encode
from cpulaunch.messages import UNREACHED
from cpulaunch.wire import MAX_LINE, MessageError

STDIN, STDOUT, STDERR = 0, 1, 2

PIECE = 1 << 16
"""Bytes that are read at once."""


class Connection:
    """ssh to the first of ``hosts``, where a spawner starts its agents, and those of the other hosts.

    ``started``: the spawner is there.  ``unwatched``: agents there can't reach the launcher.  ``pid`` is
    that of ssh.
    """

    def __init__(
        self, hosts: list[Host], start: Start, environ: Mapping[str, str], selector: selectors.BaseSelector
    ) -> None:
        """Raises OSError where ssh can't be started."""
        self.hosts, self.started, self.unwatched = hosts, False, False
        self._selector = selector
        self._outgoing = bytearray(encode(start._replace(hosts=[list(host) for host in hosts])))
        self._rest = b""  # of its stdout, without the end of a line
        self._said = b""  # on its stderr, before it has started
        pipes = [os.pipe() for _ in (STDIN, STDOUT, STDERR)]
        theirs = [pipes[STDIN][0], pipes[STDOUT][1], pipes[STDERR][1]]
        self._ours = {pipes[STDIN][1]: STDIN, pipes[STDOUT][0]: STDOUT, pipes[STDERR][0]: STDERR}

        spawner = os.getpid()

        def prepare() -> None:
            die_with(spawner, signal.SIGTERM)
            for number, fd in enumerate(theirs):
                os.dup2(fd, number)

        # A master connection that ssh leaves for others to use must not look like a process of the job.
        env = {name: value for name, value in environ.items() if not name.startswith("CPULAUNCH_")}
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
        """Send it when there is room; dropped where the connection is lost."""
        self._outgoing += encode(message)
        for fd, number in self._ours.items():
            if number == STDIN and fd not in self._selector.get_map():
                self._selector.register(fd, selectors.EVENT_WRITE, self)

    def ready(self, fd: int) -> Iterator[Any]:
        """Move bytes of a descriptor that is ready, and give the messages that have come."""
        if self._ours[fd] == STDIN:
            self._write(fd)
        elif data := self._read(fd):
            yield from self._take(fd, data)
        elif data == b"":
            self._close(fd)

    def end(self) -> Iterator[Any]:
        """ssh has ended: the last messages.  Others may hold its pipes open, such as a master connection."""
        for fd, number in list(self._ours.items()):
            while number != STDIN and (data := self._read(fd)):
                yield from self._take(fd, data)
            self._close(fd)
        if self.started:
            pass_on(STDOUT, self._rest)

    def why(self, code: int) -> str:
        """Why it has ended with this exit code before the spawner was there, in ssh's words."""
        lines = self._said.decode(errors="replace").split("\n")
        said = [line.strip().removeprefix("ssh: ") for line in lines if line.strip()]
        return said[-1] if said else f"ssh ended with code {code}"

    def has_started(self) -> None:
        """From now on, what comes is the agents'."""
        self.started = True
        pass_on(STDERR, self._said)
        self._said = b""

    def _read(self, fd: int) -> bytes | None:
        """What has come; nothing at the end, None where there is nothing yet."""
        try:
            return os.read(fd, PIECE)
        except BlockingIOError:
            return None

    def _take(self, fd: int, data: bytes) -> Iterator[Any]:
        if self._ours[fd] == STDOUT:
            yield from self._heard(data)
        elif self.started:
            self.unwatched = self.unwatched or UNREACHED.encode() in data
            pass_on(STDERR, data)
        else:
            self._said = (self._said + data)[-PIECE:]

    def _heard(self, data: bytes) -> Iterator[Any]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text, mark, rest = line.partition(MARK)
            message = None
            if mark:
                try:
                    message = decode(rest, TO_PARENT)
                except MessageError:  # a program has printed our mark
                    text = line
            if self.started and (text or not mark):
                pass_on(STDOUT, text + b"\n")
            if message is not None:  # one without fields is false
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


def pass_on(stream: int, data: bytes) -> None:
    """Write it to our own stdout or stderr; dropped where nobody reads it any more."""
    try:
        while data:
            data = data[os.write(stream, data) :]
    except OSError:
        pass
