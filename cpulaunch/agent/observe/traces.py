"""Traces of a rank's program.  The agent requests a trace through the ledger, and sends the file in pieces.

The agent imports this when the launcher first asks for a trace.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from typing import BinaryIO

from cpulaunch import ledger
from cpulaunch.agent.launch.start import Running
from cpulaunch.messages import HasTraced, SendTrace, Trace, Traced, TraceMessage, TracePiece, Traces, Tracing

PIECE = 1 << 19
"""The number of bytes of the file in one message.  In base 64, they fit even if uncompressed."""

MAX_FILE = 4 << 30
"""The largest size in bytes of a trace that is sent."""

LEVEL = 1
"""The compression level.  It is low because the agent runs on the rank's cores."""

NO_LEDGER = "its program is not Python, or the kernel refuses it a memory file"


class RankTraces:
    """The traces of one program, one at a time."""

    def __init__(self, running: Running | None, tell: Callable[[TraceMessage], None]) -> None:
        """``running`` is the program, or None if it was not started."""
        self._ledger = running.ledger if running else None
        self._tell = tell
        self._request = 0
        self._directory = ""
        self._file: BinaryIO | None = None
        self._packer = zlib.compressobj(LEVEL, wbits=31)
        self._asked = False  # the program hasn't answered yet

    @property
    def sending(self) -> bool:
        """Whether the launcher may still fetch pieces of a complete trace."""
        return self._file is not None

    def ask(self, message: Trace) -> None:
        """Request a trace from the program, or cancel the request if ``message.first`` is 0."""
        self.drop()
        self._request = message.request
        if self._ledger is None:
            self._fail(NO_LEDGER)
            return
        if message.first:
            try:
                self._directory = tempfile.mkdtemp(prefix="cpulaunch-trace-")
            except OSError as e:
                self._fail(f"there is no directory for its file: {e.strerror}")
                return
        wanted = ledger.TraceRequest(message.request, message.first, message.last, self._directory)
        try:
            ledger.request_trace(self._ledger, wanted)
            self._asked = bool(message.first)
        except ValueError:
            self._fail(f"the directory for its file has too long a name: {self._directory}")

    def reported(self, report: Traces | HasTraced) -> None:
        """Handle the program's report about a trace.  It is untrusted: any child may write one."""
        if report.request != self._request or not self._asked:
            return
        if isinstance(report, Traces):
            self._tell(Tracing(*report))
            return
        self._asked = False
        if report.error:
            self._fail(report.error)
            return
        try:
            path = os.path.join(self._directory, ledger.TRACE_FILE)
            self._file = open(path, "rb", 0)  # noqa: SIM115
            size = os.fstat(self._file.fileno()).st_size
        except OSError as e:
            self._fail(f"its file can't be read: {e.strerror}")
            return
        self._remove()
        if not 0 < size <= MAX_FILE:
            self._fail(f"its file has {size} bytes; fewer steps make a smaller one")
            return
        self._packer = zlib.compressobj(LEVEL, wbits=31)
        self._tell(Traced(report.request, report.first, report.last, size, ""))

    def send(self, message: SendTrace) -> None:
        """Send the next piece of the file, or at its end the rest of the compressed data."""
        if self._file is None or message.request != self._request:
            return
        try:
            data = self._file.read(PIECE)
        except OSError as e:
            self._tell(TracePiece(self._request, "", True, f"its file can't be read: {e.strerror}"))
            self._close()
            return
        packed = self._packer.compress(data) if data else self._packer.flush()
        self._tell(TracePiece(self._request, base64.b64encode(packed).decode(), not data, ""))
        if not data:
            self._close()

    def program_ended(self) -> None:
        """Report that the program ended before its trace was complete."""
        if self._asked:
            progress = ledger.progress(self._ledger) if self._ledger else None
            has_steps = progress and progress.steps
            when = "before the last traced step" if has_steps else "without a step of an optimizer"
            self._fail(f"its program exited {when}")

    def drop(self) -> None:
        """Discard the trace and its file."""
        self._asked = False
        self._close()
        self._remove()

    def _fail(self, why: str) -> None:
        self._tell(Traced(self._request, 0, 0, 0, why))
        self.drop()

    def _close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _remove(self) -> None:
        if self._directory:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._directory)
            self._directory = ""
