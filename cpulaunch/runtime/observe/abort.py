"""A rank's report before gloo aborts it: its threads' stacks, and the ledger's last collectives.

If a peer sends more than expected, gloo throws in its own thread, where the exception can't be caught.  C++
then calls the terminate handler, which aborts the process and loses torch's flight recorder.  The handler
installed here runs first.  It takes Python's lock (the GIL).  It would wait forever if another thread held
the lock and waited for the thread that aborts.  torch releases the lock in everything that moves data, but
not while it destroys a group, so the handler is removed for that time.
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
"""Maximum frames reported of a thread; further frames of its outer end are left out."""

MAX_THREADS = 16

report: Callable[[bytes], object] | None = None
"""Writes a line to this rank's agent; the bootstrap sets it when this module is loaded."""

LIBRARY = "libstdc++.so.6"

PATIENCE = 2.0
"""Maximum seconds of the last look."""

_Handler = ctypes.CFUNCTYPE(None)

_words: _LastWords | None = None


def watch(look: Callable[[], object]) -> None:
    """Have ``look`` bring the ledger up to date before C++ aborts the process, from now on."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:  # another C++ library
        return
    apply_changes(LIBRARY, [(change, look) for change in CHANGES], library)


def _say_before_abort(library: Any, look: Callable[[], object]) -> None:
    global _words
    set_terminate = library._ZSt13set_terminatePFvvE
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    _words = _LastWords(look, set_terminate)
    _words.listen(True)
    # At its end, Python admits no other thread.
    atexit.register(_words.end)


CHANGES = (
    Change(
        ("_ZSt13set_terminatePFvvE",),
        (),
        "C++'s terminate handler: reports what the rank was doing, and then calls the former handler",
        "the calls of a rank that gloo aborts are not reported",
        _say_before_abort,
    ),
)


@contextlib.contextmanager
def nothing_said() -> Iterator[None]:
    """Remove the handler during an operation that may hold the GIL until the aborting thread has ended."""
    if _words is None:
        yield
        return
    _words.listen(False)
    try:
        yield
    finally:
        _words.listen(True)


class _LastWords:
    def __init__(self, look: Callable[[], object], set_terminate: Callable[[object], int]) -> None:
        self._look, self._set_terminate = look, set_terminate
        self._handler = _Handler(self._before_abort)
        self._address = ctypes.cast(self._handler, ctypes.c_void_p)
        self._former = set_terminate(self._address)
        self._said, self._ended = threading.Lock(), False
        # A forked process is not the rank, and its copy of the recorder's lock may never be released.
        os.register_at_fork(after_in_child=functools.partial(self._said.acquire, blocking=False))

    def listen(self, on: bool) -> None:
        """Install our handler if ``on``, else the handler that ours replaced."""
        self._set_terminate(self._address if on and not self._ended else self._former)

    def end(self) -> None:
        """Restore the former handler for good."""
        self._ended = True
        self.listen(False)

    def _before_abort(self) -> None:
        if self._said.acquire(blocking=False):  # the first of several threads
            # Abort within PATIENCE, whatever a look may wait for.
            thread = threading.Thread(target=self._say, name="cpulaunch-last-words", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads can be started
                thread.start()
                thread.join(PATIENCE)
        _Handler(self._former)()  # reports the reason and aborts

    def _say(self) -> None:
        with contextlib.suppress(Exception):
            self._look()
            if report is not None:
                report(encode(Aborts(list(_threads()))))


def _threads() -> Iterator[dict[str, Any]]:
    """Yield Python's threads as in ``Dump.processes``, the main one first."""
    frames, main = sys._current_frames(), threading.main_thread()
    others = (each for each in threading.enumerate() if each is not threading.current_thread())
    there = sorted(others, key=lambda thread: thread is not main)
    for thread in [each for each in there if each.ident in frames][:MAX_THREADS]:
        if theirs := _frames(frames[thread.ident or 0]):
            yield {
                "id": thread.native_id,
                "name": "MainThread" if thread is main else thread.name,
                "gil": False,
                "idle": None,
                "frames": theirs,
            }


def _frames(frame: FrameType | None) -> list[tuple[str, str, int]]:
    """Return frames, the innermost first; for a thread that aborts, those from before the abort."""
    found: list[tuple[str, str, int]] = []
    while frame is not None:
        code = frame.f_code
        name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
        found.append((name, code.co_filename, frame.f_lineno))
        if code.co_filename == __file__:
            found.clear()
        frame = frame.f_back
    return found[:MAX_FRAMES]
