"""Reports a rank's stack traces and last collectives before gloo aborts the process.

If a peer sends more bytes than expected, gloo throws an exception in its own thread.  C++ then calls the
terminate handler, which aborts the process.  The handler installed here runs first, and then calls the
previous one.

The handler needs the GIL, so it would deadlock if the owner of the GIL waited for the aborting thread.  torch
releases the GIL in all operations, except while it destroys a group, so the handler is removed for that time.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from cpulaunch.messages import Aborts
from cpulaunch.runtime.hooks import Change, apply_changes
from cpulaunch.wire import encode

MAX_FRAMES = 64
"""Maximum frames of a stack trace; outer frames are left out."""

MAX_THREADS = 16

report: Callable[[bytes], object] | None = None
"""Writes a line to this rank's agent; the bootstrap sets it.  None outside of a job."""

LIBRARY = "libstdc++.so.6"

PATIENCE = 2.0
"""Maximum seconds by which the report delays the abort."""

_Function = ctypes.CFUNCTYPE(None)

_handler: _TerminateHandler | None = None


def watch(look: Callable[[], object]) -> None:
    """Install the handler, which calls ``look`` to update the ledger and then sends the report."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:  # torch uses another C++ library
        return
    apply_changes(LIBRARY, [(change, look) for change in CHANGES], library)


def _install_handler(library: Any, look: Callable[[], object]) -> None:
    global _handler
    set_terminate = library._ZSt13set_terminatePFvvE
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    _handler = _TerminateHandler(look, set_terminate)
    # When the interpreter shuts down, no other thread can take the GIL.
    atexit.register(_handler.remove)


CHANGES = (
    Change(
        ("_ZSt13set_terminatePFvvE",),
        (),
        "C++'s terminate handler: reports the rank's stacks and collectives, then calls the previous handler",
        "the calls of a rank that gloo aborts are not reported",
        _install_handler,
    ),
)


@contextlib.contextmanager
def handler_removed() -> Iterator[None]:
    """Remove the handler during an operation that may wait for the aborting thread with the GIL held."""
    if _handler is None:
        yield
        return
    _handler.enable(False)
    try:
        yield
    finally:
        _handler.enable(True)


class _TerminateHandler:
    def __init__(self, look: Callable[[], object], set_terminate: Callable[[object], int]) -> None:
        self._look, self._set_terminate = look, set_terminate
        self._function = _Function(self._terminate)
        self._address = ctypes.cast(self._function, ctypes.c_void_p)
        self._previous = set_terminate(self._address)
        self._reported, self._removed = threading.Lock(), False
        # A forked process must not report as the rank.
        os.register_at_fork(after_in_child=functools.partial(self._reported.acquire, blocking=False))

    def enable(self, on: bool) -> None:
        """Install this handler if ``on``, else the previous one."""
        self._set_terminate(self._address if on and not self._removed else self._previous)

    def remove(self) -> None:
        """Restore the previous handler for good."""
        self._removed = True
        self.enable(False)

    def _terminate(self) -> None:
        if self._reported.acquire(blocking=False):  # several threads may terminate
            # In a thread, because ``look`` may wait for a lock.
            thread = threading.Thread(target=self._report, name="cpulaunch-abort", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started
                thread.start()
                thread.join(PATIENCE)
        _Function(self._previous)()  # prints the exception and aborts

    def _report(self) -> None:
        with contextlib.suppress(Exception):
            self._look()
            if report is not None:
                report(encode(Aborts(list(_threads()))))


def _threads() -> Iterator[dict[str, Any]]:
    """Yield Python's threads in the format of ``Dump.processes``, the main thread first."""
    frames, main = sys._current_frames(), threading.main_thread()
    others = (each for each in threading.enumerate() if each is not threading.current_thread())
    threads = sorted(others, key=lambda thread: thread is not main)
    for thread in [each for each in threads if each.ident in frames][:MAX_THREADS]:
        if stack := _stack(frames[thread.ident or 0]):
            yield {
                "id": thread.native_id,
                "name": "MainThread" if thread is main else thread.name,
                "gil": False,
                "idle": None,
                "frames": stack,
            }


def _stack(frame: FrameType | None) -> list[tuple[str, str, int]]:
    """Return a stack trace, the innermost frame first, without the frames of this module."""
    found: list[tuple[str, str, int]] = []
    while frame is not None:
        code = frame.f_code
        name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
        found.append((name, code.co_filename, frame.f_lineno))
        if code.co_filename == __file__:
            found.clear()
        frame = frame.f_back
    return found[:MAX_FRAMES]
