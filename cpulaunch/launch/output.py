"""What goes into the job's directory, and the ranks' output on the terminal, line by line."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from cpulaunch.cluster.cores import CoreSet
from cpulaunch.errors import ConfigError

MAX_SHOWN_LINE = 1 << 16
"""Bytes after which the terminal gets a line's beginning, though its end isn't there yet."""


def shown_ranks(tee: str, world_size: int) -> frozenset[int]:
    """The ranks that ``--tee`` names: ``all``, ``none``, or a list such as ``0,4-7``."""
    if tee in ("all", "none"):
        return frozenset(range(world_size) if tee == "all" else ())
    ranks = frozenset(CoreSet.parse(tee))
    if not ranks <= frozenset(range(world_size)):
        raise ConfigError(f"--tee {tee}: the ranks are 0 to {world_size - 1}", part=tee)
    return ranks


class Output:
    """Takes the ranks' output as it comes, in pieces.

    Each rank's log has its bytes unchanged.  On the terminal, lines of several ranks get the prefix
    ``[rank] `` and never mix; those of a single shown rank pass as they are.
    """

    def __init__(self, directory: Path, shown: frozenset[int], warn: Callable[[str], None]) -> None:
        self._directory, self._shown, self._warn = directory, shown, warn
        self._logs: dict[str, BinaryIO | None] = {}
        self._rest: dict[tuple[int, int], bytes] = {}
        self._deaf: set[int] = set()

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Output of a rank's ``stream``: 1 is stdout, 2 is stderr."""
        self.keep(f"rank-{rank}.log", data)
        if rank not in self._shown:
            return
        if len(self._shown) == 1:
            self._show(stream, data)
            return
        *lines, rest = (self._rest.get((rank, stream), b"") + data).split(b"\n")
        if len(rest) > MAX_SHOWN_LINE:
            lines, rest = [*lines, rest], b""
        self._rest[rank, stream] = rest
        self._show(stream, b"".join(b"[%d] %s\n" % (rank, line) for line in lines))

    def finish(self, rank: int) -> None:
        """The rank has ended: show what has no line end, and close its log."""
        for stream in (1, 2):
            if rest := self._rest.pop((rank, stream), b""):
                self._show(stream, b"[%d] %s\n" % (rank, rest))
        if log := self._logs.pop(f"rank-{rank}.log", None):
            log.close()

    def keep(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Append to the file ``name`` of the job's directory; one warning where that can't be done.

        ``private``: nobody else may read it.
        """
        try:
            if name not in self._logs:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._logs[name] = os.fdopen(
                    os.open(self._directory / name, flags, 0o600 if private else 0o666), "ab", 0
                )
            if log := self._logs[name]:
                log.write(data)
        except OSError as e:
            if None not in self._logs.values():
                self._warn(f"{self._directory} can't be written: {e.strerror}; the job goes on without logs")
            self._logs[name] = None

    def _show(self, stream: int, data: bytes) -> None:
        if data and stream not in self._deaf and not write_all(stream, data):
            self._deaf.add(stream)  # `| head` has seen enough


def write_all(stream: int, data: bytes) -> bool:
    """Write to our own stdout (1) or stderr (2), however slow it is.  False: nobody reads it any more."""
    if own := sys.stdout if stream == 1 else sys.stderr:
        own.flush()
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(stream, view) :]
        except BlockingIOError:  # a terminal that somebody made non-blocking
            select.select([], [stream], [])
        except OSError:
            return False
    return True
