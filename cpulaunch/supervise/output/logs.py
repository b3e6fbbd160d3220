"""The files of a job's directory, written by a thread of its own: a disk that hangs stops nobody."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from cpulaunch.supervise.output.directory import JobDirectory

MAX_WAITING = 16 << 20
"""Bytes that may wait for the disk; ranks with more to say have to wait then."""

HUNG = 5.0
"""Seconds in which a disk that works takes something.  For any other, ``MAX_WAITING`` bytes are kept."""

AT_ONCE = 1 << 18
"""Bytes that are written at once, so that a disk which is only slow isn't taken for one that hangs."""

OPEN_LOGS = 64
"""Files that stay open at most, so that a thousand ranks don't take a thousand descriptors."""


class _Piece(NamedTuple):
    """Bytes for a file, which is made with ``mode``; None closes it.  ``whole``: they are all of it."""

    name: str
    data: bytes | None
    mode: int = 0o666
    whole: bool = False


class Logs:
    """Appends to files of ``directory``, in order, and never blocks.

    ``warn`` gets one line where that can't be done, and one where the disk hangs.
    """

    def __init__(self, directory: JobDirectory, warn: Callable[[str], None]) -> None:
        self._directory, self._warn = directory, warn
        self._changed = threading.Condition()
        self._waiting: deque[_Piece] = deque()
        self._bytes = 0
        self._progress: float | None = None  # when the thread, which has something to write, last wrote
        self._closed = self._dropping = False
        self._warned: set[str] = set()
        self._thread: threading.Thread | None = None
        # The thread's own.
        self._open: dict[str, BinaryIO] = {}  # those written last, the longest ago first
        self._unwritable: set[str] = set()

    def append(self, name: str, data: bytes, *, private: bool = False) -> bool:
        """Append to the file ``name``, soon; False where that is dropped, as too much waits for the disk.

        ``private``: nobody else may read it.
        """
        hung = self._hangs_for(HUNG)
        if hung:
            self._warn_once("hung", "does not answer; the job goes on without logs until it does")
        if self._bytes > MAX_WAITING and (hung or self._dropping):
            self._warn_once("dropped", "took too little; its logs are not complete")
            return False
        self._put(_Piece(name, data, 0o600 if private else 0o666))
        return True

    def write_whole(self, name: str, data: bytes) -> None:
        """Let ``data`` be the file ``name``, soon: all of it, or none, and then ``warn`` gets a line."""
        self._put(_Piece(name, data, whole=True))

    def finish(self, name: str) -> None:
        """Close the file ``name``, until more is appended; what could not be written is tried again then."""
        self._put(_Piece(name, None))

    @property
    def full(self) -> bool:
        """Whether more should wait until the disk, which is only slow, has taken what is there."""
        return self._bytes > MAX_WAITING and not self._dropping and not self._hangs_for(HUNG)

    def hurry(self) -> None:
        """From now on, drop what the disk doesn't take, rather than letting anybody wait."""
        self._dropping = True

    def close(self, patience: float) -> bool:
        """Wait until all is written; False where nothing more was for ``patience`` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            began = time.monotonic()
            while self._busy():
                left = max(began, self._progress or began) + patience - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _put(self, piece: _Piece) -> None:
        with self._changed:
            self._waiting.append(piece)
            self._bytes += len(piece.data or b"")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="logs", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _busy(self) -> bool:
        return bool(self._waiting) or self._progress is not None

    def _hangs_for(self, seconds: float) -> bool:
        last = self._progress
        return last is not None and time.monotonic() > last + seconds

    def _warn_once(self, kind: str, what: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(f"{self._directory.path} {what}")

    # ---- in the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._progress = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                batch, self._waiting, self._bytes = self._waiting, deque(), 0
                self._progress = time.monotonic()
            gathered: dict[str, list[_Piece]] = {}
            for piece in batch:
                if piece.whole:
                    self._write_whole(piece)
                    continue
                gathered.setdefault(piece.name, []).append(piece)
                if piece.data is None:
                    self._write(gathered.pop(piece.name))
            for pieces in gathered.values():
                self._write(pieces)

    def _write(self, pieces: list[_Piece]) -> None:
        """Write the pieces of one file; the last one may close it."""
        name, mode = pieces[0].name, pieces[0].mode
        data = b"".join(piece.data for piece in pieces if piece.data is not None)
        try:
            if data and name not in self._unwritable:
                self._write_all(self._file(name, mode), data)
        except OSError as e:
            self._unwritable.add(name)
            self._cannot_write(e)
        if pieces[-1].data is None:
            self._unwritable.discard(name)
            self._close(name)
        self._progress = time.monotonic()

    def _write_whole(self, piece: _Piece) -> None:
        try:
            with self._directory.whole(piece.name, piece.mode) as file:
                self._write_all(file, piece.data or b"")
        except OSError as e:
            self._warn(f"{self._directory.path / piece.name} can't be written: {e.strerror}")
        self._progress = time.monotonic()

    def _close(self, name: str) -> None:
        if log := self._open.pop(name, None):
            try:
                log.close()
            except OSError as e:  # as NFS says only now that a write has failed (close(2))
                self._cannot_write(e)

    def _cannot_write(self, error: OSError) -> None:
        self._warn_once("full", f"can't be written: {error.strerror}; the job goes on without logs")

    def _write_all(self, file: BinaryIO, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest[:AT_ONCE]) :]
            self._progress = time.monotonic()

    def _file(self, name: str, mode: int) -> BinaryIO:
        """The open file ``name``; the one written longest ago is closed for it."""
        log = self._open.pop(name, None)
        if log is None:
            if len(self._open) >= OPEN_LOGS:
                self._close(next(iter(self._open)))
            log = os.fdopen(self._directory.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode), "ab", 0)
        self._open[name] = log
        return log
