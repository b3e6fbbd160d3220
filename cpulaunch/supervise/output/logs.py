"""Write the files of a job's directory in a thread, so that a hanging disk does not block the launcher."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from cpulaunch.supervise.output.directory import JobDirectory

MAX_WAITING = 16 << 20
"""Maximum bytes that wait for the disk.  Beyond that, ranks that print have to wait."""

HUNG = 5.0
"""Seconds without a completed write after which the disk counts as hung.

Ranks do not wait for a hung disk: output beyond ``MAX_WAITING`` bytes is dropped.
"""

AT_ONCE = 1 << 18
"""Maximum bytes per write call.  With larger calls, a slow disk might count as hung."""

OPEN_LOGS = 64
"""Maximum number of open files, so that a thousand ranks do not need a thousand descriptors."""


class _Piece(NamedTuple):
    """Bytes for the file ``name``.

    ``mode`` is the mode of the file if it is created.  ``data`` is None to close the file.  ``whole``: the
    data replaces the file.
    """

    name: str
    data: bytes | None
    mode: int = 0o666
    whole: bool = False


class Logs:
    """Appends to files of ``directory``, in order.  Never blocks.

    ``warn`` is called with a line, at most once for each cause, when writing fails, when the disk hangs, and
    when output is dropped.
    """

    def __init__(self, directory: JobDirectory, warn: Callable[[str], None]) -> None:
        self._directory, self._warn = directory, warn
        self._changed = threading.Condition()
        self._waiting: deque[_Piece] = deque()
        self._bytes = 0
        self._progress: float | None = None  # when the thread last wrote; None while it is idle
        self._closed = self._dropping = False
        self._warned: set[str] = set()
        self._thread: threading.Thread | None = None
        # Used by the thread only.
        self._open: dict[str, BinaryIO] = {}  # the least recently written first
        self._unwritable: set[str] = set()

    def append(self, name: str, data: bytes, *, private: bool = False) -> bool:
        """Queue ``data`` to be appended to the file ``name``.

        Returns False if the data is dropped because too much waits for the disk.  ``private``: only the owner
        may read the file.
        """
        hung = self._hangs
        if hung:
            self._warn_once("hung", "does not respond; the job goes on without logs until it does")
        if self._bytes > MAX_WAITING and (hung or self._dropping):
            self._warn_once("dropped", "was too slow; its logs are not complete")
            return False
        self._put(_Piece(name, data, 0o600 if private else 0o666))
        return True

    def write_whole(self, name: str, data: bytes) -> None:
        """Queue ``data`` to replace the file ``name`` atomically.  If that fails, ``warn`` is called."""
        self._put(_Piece(name, data, whole=True))

    def finish(self, name: str) -> None:
        """Close the file ``name`` until more is appended.

        If writing to it has failed, the next append tries again.
        """
        self._put(_Piece(name, None))

    @property
    def full(self) -> bool:
        """Whether callers should wait before they append more.  Always False for a hung disk."""
        return self._bytes > MAX_WAITING and not self._dropping and not self._hangs

    def hurry(self) -> None:
        """From now on, drop output instead of waiting for the disk."""
        self._dropping = True

    def close(self, patience: float) -> bool:
        """Wait until all is written.  Returns False if nothing was written for ``patience`` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            began = time.monotonic()
            while self._waiting or self._progress is not None:
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

    @property
    def _hangs(self) -> bool:
        last = self._progress
        return last is not None and time.monotonic() > last + HUNG

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
            except OSError as e:  # NFS may report a failed write only now (close(2))
                self._cannot_write(e)

    def _cannot_write(self, error: OSError) -> None:
        self._warn_once("full", f"can't be written: {error.strerror}; the job goes on without logs")

    def _write_all(self, file: BinaryIO, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest[:AT_ONCE]) :]
            self._progress = time.monotonic()

    def _file(self, name: str, mode: int) -> BinaryIO:
        """Return the open file ``name``.  Closes the least recently written file if too many are open."""
        log = self._open.pop(name, None)
        if log is None:
            if len(self._open) >= OPEN_LOGS:
                self._close(next(iter(self._open)))
            log = os.fdopen(self._directory.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode), "ab", 0)
        self._open[name] = log
        return log
