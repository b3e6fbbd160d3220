"""The program's pipes (stdout, stderr and its bootstrap's reports), and the agent's own stdout and stderr."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator

from cpulaunch.messages import FROM_RANK, Report, Unknown
from cpulaunch.wire import MAX_OUTPUT, Lines, MessageError, decode

REPORTS = 0
"""The stream of the bootstrap's reports; 1 is stdout, 2 is stderr."""


class Pipes:
    """The agent's ends of the program's pipes, registered for reading."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._streams: dict[int, int] = {}  # file descriptor → stream
        self._paused = False

    def open(self) -> tuple[int, int, int]:
        """Create the pipes, and return the program's ends for stdout, stderr and reports."""
        ends = []
        for stream in (1, 2, REPORTS):
            read_end, write_end = os.pipe()
            self._streams[read_end] = stream
            self._selector.register(read_end, selectors.EVENT_READ)
            ends.append(write_end)
        return ends[0], ends[1], ends[2]

    def __contains__(self, fd: int) -> bool:
        return fd in self._streams

    def read(self, fd: int) -> tuple[int, bytes]:
        """Read at most MAX_OUTPUT bytes.  Returns the stream's number and the data, empty at its end."""
        stream = self._streams[fd]
        data = os.read(fd, MAX_OUTPUT)
        if not data:
            self._selector.unregister(fd)
            os.close(fd)
            del self._streams[fd]
        return stream, data

    def ready(self) -> list[int]:
        """The file descriptors that can be read now."""
        return [key.fd for key, _ in self._selector.select(0) if key.fd in self._streams]

    def pause(self, pause: bool) -> None:
        """Stop or resume reading stdout and stderr.  The program blocks once a pipe is full."""
        if pause == self._paused:
            return
        self._paused = pause
        for fd, stream in self._streams.items():
            if stream != REPORTS and pause:
                self._selector.unregister(fd)
            elif stream != REPORTS:
                self._selector.register(fd, selectors.EVENT_READ)

    def forget(self) -> None:
        """Stop reading all streams, even if other processes can still write to them."""
        for fd in self._streams:
            self._selector.unregister(fd)
        self._streams.clear()


class Printer:
    """Prints lines with the rank's prefix."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rest = {1: b"", 2: b""}  # incomplete lines

    def print(self, stream: int, data: bytes) -> None:
        """Print the lines that ``data`` completes on our stdout (1) or stderr (2)."""
        *lines, rest = (self._rest[stream] + data).split(b"\n")
        if len(rest) > MAX_OUTPUT:
            lines, rest = [*lines, rest], b""
        self._rest[stream] = rest
        pass_on(stream, b"".join(b"[%d] %s\n" % (self._rank, line) for line in lines))

    def finish(self) -> None:
        """Print the incomplete lines, with a line end."""
        for stream, rest in self._rest.items():
            if rest:
                self.print(stream, b"\n")


def pass_on(stream: int, data: bytes) -> None:
    """Write data to our own stdout (1) or stderr (2).  Drop it if the reader is gone."""
    try:
        while data:
            data = data[os.write(stream, data) :]
    except OSError:
        pass


class Reports:
    """Parses the reports of one program.  They are untrusted: any child of the program may write them."""

    def __init__(self) -> None:
        self._lines = Lines()

    def feed(self, data: bytes) -> Iterator[Report | Unknown]:
        """Yield the reports that ``data`` completes.  Stop at the first malformed line, and drop the rest."""
        try:
            for line in self._lines.feed(data):
                yield decode(line, FROM_RANK)
        except MessageError:
            self._lines = Lines()
