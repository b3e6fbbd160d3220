"""Write stdout and stderr in a thread, so that a blocked terminal does not block the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import threading
from collections import deque

MAX_WAITING = 4 << 20
"""Maximum bytes that wait for the terminal.  Beyond that, ranks that print have to wait."""

_CLEAR = b"\r\x1b[K"


class Screen:
    """Shows output in order.  ``status``: stderr is a terminal, and its last line is a status line."""

    def __init__(self, status: bool = False) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._writing = self._closed = self._dropping = False
        self._closed_streams: set[int] = set()
        self._status: bytes | None = b"" if status else None
        self._shown = self._status
        self._drawn = False
        self._at_line_start = True
        self._stderr_at_line_start = True  # after all waiting data is shown
        self._thread: threading.Thread | None = None
        self._room: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, stream: int, data: bytes) -> None:
        """Queue ``data`` for stdout (1) or stderr (2).  Never blocks."""
        with self._changed:
            if not data or stream in self._closed_streams or (self._dropping and self._bytes > MAX_WAITING):
                return
            self._waiting.append((stream, data))
            if stream == 2:
                self._stderr_at_line_start = data.endswith(b"\n")
            self._bytes += len(data)
            if self._room and self._bytes > MAX_WAITING and not self._dropping:
                self._room.clear()
            self._start()

    def say(self, text: str) -> None:
        """Show ``text`` on a new line of stderr, even if the last line has not ended."""
        self.put(2, (text if self._stderr_at_line_start else f"\n{text}").encode(errors="surrogateescape"))

    def status(self, text: str) -> None:
        """Set the status line, cut to the width of the terminal.  Does nothing if there is none."""
        if self._status is None:
            return
        with contextlib.suppress(OSError):  # a wrapped line can't be cleared
            text = text[: max(0, os.get_terminal_size(2).columns - 1)]
        with self._changed:
            self._status = text.encode(sys.stderr.encoding, "replace")
            self._start()

    @property
    def full(self) -> bool:
        """Whether ranks have to wait for the terminal."""
        return self._room is not None and not self._room.is_set()

    def serve_loop(self) -> None:
        """Make ``room`` wait in the running event loop from now on."""
        with self._changed:
            self._room, self._loop = asyncio.Event(), asyncio.get_running_loop()
            if self._bytes <= MAX_WAITING or self._dropping:
                self._room.set()

    async def room(self) -> None:
        assert self._room
        await self._room.wait()

    def hurry(self) -> None:
        """From now on, drop output instead of waiting for the terminal."""
        with self._changed:
            self._dropping = True
            if self._room:
                self._room.set()

    def close(self, timeout: float | None) -> bool:
        """Wait until all is shown, at most ``timeout`` seconds.  Returns False if something is left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._busy(), timeout)

    def _busy(self) -> bool:
        return bool(self._waiting or self._writing or self._drawn)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="screen", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed or self._shown != self._status)
                if self._closed and not self._busy():
                    return
                self._writing = True
                batch, self._waiting = list(self._waiting), deque()
                self._bytes = 0
                status = b"" if self._closed else self._status
            if self._drawn:
                write_all(2, _CLEAR)
                self._drawn = False
            for stream, data in batch:
                if stream not in self._closed_streams and not write_all(stream, data):
                    self._closed_streams.add(stream)  # such as a pipe to `head`, which has ended
                self._at_line_start = data.endswith(b"\n")
            if status and self._at_line_start:  # else a rank's own progress bar is on this line
                write_all(2, status)
                self._drawn = True
            self._shown = status
            if self._room and self._loop and not self._room.is_set():
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._room.set)


def write_all(stream: int, data: bytes) -> bool:
    """Write all of ``data`` to our own stdout (1) or stderr (2), and wait if necessary.

    Returns False if that fails, for example because a pipe has no reader.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(stream, view) :]
        except BlockingIOError:  # a terminal that somebody made non-blocking
            select.select([], [stream], [])
        except OSError:
            return False
    return True
