"""What this rank says before gloo aborts it: what its threads do, and the last collectives in the ledger.

Where a peer sends more than is expected, gloo throws in a thread of its own, in which nobody can catch it:
C++ calls the terminate handler, which aborts the process, and torch's flight recorder dies with it.  So this
one comes before.  It takes Python's lock (the GIL), for which it would wait for ever where another thread
keeps it and itself waits for the one that aborts.  torch lets go of it in all that moves data, but not where
a group is destroyed, so there the handler is not in place.
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
"""Frames of a thread that are told; further ones of its outer end are left out."""

MAX_THREADS = 16

report: Callable[[bytes], object] | None = None
"""Writes a line to this rank's agent; the bootstrap puts it here when this module is loaded."""

LIBRARY = "libstdc++.so.6"

PATIENCE = 2.0
"""Seconds that the last look may take."""

_Handler = ctypes.CFUNCTYPE(None)

_words: _LastWords | None = None


def watch(look: Callable[[], object]) -> None:
    """From now on, ``look`` brings the ledger up to date before C++ aborts the process."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:  # another library of C++
        return
    apply_changes(LIBRARY, [(change, look) for change in CHANGES], library)


def _say_before_abort(library: Any, look: Callable[[], object]) -> None:
    global _words
    set_terminate = library._ZSt13set_terminatePFvvE
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    _words = _LastWords(look, set_terminate)
    _words.listen(True)
    # While Python ends, it lets no other thread in.
    atexit.register(_words.end)


CHANGES = (
    Change(
        ("_ZSt13set_terminatePFvvE",),
        (),
        "C++'s terminate handler: says what the rank was doing, before it calls the former one",
        "nobody knows what a rank was doing that gloo aborts",
        _say_before_abort,
    ),
)


@contextlib.contextmanager
def nothing_said() -> Iterator[None]:
    """What may keep Python's lock until the thread that aborts has ended: C++ aborts without a word."""
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
        # A process that is forked is not the rank, and its copy of the recorder's lock may never be free.
        os.register_at_fork(after_in_child=functools.partial(self._said.acquire, blocking=False))

    def listen(self, on: bool) -> None:
        """Have the handler in its place, or the former one."""
        self._set_terminate(self._address if on and not self._ended else self._former)

    def end(self) -> None:
        """For good."""
        self._ended = True
        self.listen(False)

    def _before_abort(self) -> None:
        if self._said.acquire(blocking=False):  # of several threads, the first one
            # It must end as it would without us, whatever a look may wait for.
            thread = threading.Thread(target=self._say, name="cpulaunch-last-words", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads
                thread.start()
                thread.join(PATIENCE)
        _Handler(self._former)()  # which says why, and aborts

    def _say(self) -> None:
        with contextlib.suppress(Exception):
            self._look()
            if report is not None:
                report(encode(Aborts(list(_threads()))))


def _threads() -> Iterator[dict[str, Any]]:
    """Those of Python, as in ``Dump.processes``; the main one first."""
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
    """The innermost first; of a thread that aborts, those from before that."""
    found: list[tuple[str, str, int]] = []
    while frame is not None:
        code = frame.f_code
        name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
        found.append((name, code.co_filename, frame.f_lineno))
        if code.co_filename == __file__:
            found.clear()
        frame = frame.f_back
    return found[:MAX_FRAMES]
