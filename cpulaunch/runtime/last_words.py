"""What this rank says before gloo aborts it: what its threads do, and the last collectives in the ledger.

Where a peer sends more than is expected, gloo throws in a thread of its own, in which nobody can catch it:
C++ calls the terminate handler, which aborts the process, and torch's flight recorder dies with it.  So this
one comes before.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from cpulaunch.messages import Aborts
from cpulaunch.wire import encode

MAX_FRAMES = 64
"""Frames of a thread that are told; further ones of its outer end are left out."""

MAX_THREADS = 16

report: Callable[[bytes], object] | None = None
"""Writes a line to this rank's agent; the bootstrap puts it here when this module is loaded."""

_Handler = ctypes.CFUNCTYPE(None)

_kept: list[Any] = []
"""Handlers that C++ has been given."""


def say_before_abort(look: Callable[[], object]) -> None:
    """From now on, ``look`` brings the ledger up to date before C++ aborts the process."""
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):  # another library of C++
        return
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    lock = threading.Lock()
    # A process that is forked is not the rank, and may have a copy of the recorder's lock that nobody frees.
    os.register_at_fork(after_in_child=functools.partial(lock.acquire, blocking=False))

    def before_abort() -> None:
        if lock.acquire(blocking=False):  # of several threads, the first one
            try:
                look()
                if report is not None:
                    report(encode(Aborts(list(_threads()))))
            except Exception:
                pass  # it must end as it would without us
        former()  # which says why, and aborts

    ours = _Handler(before_abort)
    address = set_terminate(ctypes.cast(ours, ctypes.c_void_p))
    former = _Handler(address)
    _kept.append(ours)
    # While Python ends, it lets no other thread in.
    atexit.register(set_terminate, address)


def _threads() -> Iterator[dict[str, Any]]:
    """Those of Python, as in ``Dump.processes``; the main one first."""
    frames, main = sys._current_frames(), threading.main_thread()
    there = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    for thread in [each for each in there if each.ident in frames][:MAX_THREADS]:
        yield {
            "id": thread.native_id,
            "name": "MainThread" if thread is main else thread.name,
            "gil": False,
            "idle": None,
            "frames": _frames(frames[thread.ident or 0]),
        }


def _frames(frame: FrameType | None) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    while frame is not None and len(found) < MAX_FRAMES:
        code = frame.f_code
        if code.co_filename == __file__:
            frame = frame.f_back
            continue
        found.append(
            (
                code.co_qualname if sys.version_info >= (3, 11) else code.co_name,
                code.co_filename,
                frame.f_lineno,
            )
        )
        frame = frame.f_back
    return found
