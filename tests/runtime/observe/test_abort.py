"""A rank's last message before C++ aborts it doesn't prevent the abort."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from support.command import TIMEOUT

PROGRAM = """
import ctypes, sys, threading
from cpulaunch.runtime.observe import abort
terminate = ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev
def abort_in_a_thread_of_c():
    thread = ctypes.c_ulong()
    with_the_gil.pthread_create(ctypes.byref(thread), None, terminate, None)
with_the_gil = ctypes.PyDLL(None)
def says(line):
    sys.stderr.buffer.write(line)
    sys.stderr.flush()
abort.report = says
"""


def aborted(program: str) -> str:
    """Return the program's stderr, after C++ has aborted it."""
    argv = [sys.executable, "-c", PROGRAM + program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == -signal.SIGABRT, done.stderr
    return done.stderr


def test_the_threads_are_reported() -> None:
    said = aborted(
        "abort.watch(lambda: None)\n"
        "def fails():\n    terminate()\n"
        "threading.Thread(target=fails, name='worker').start()\n"
        "threading.Event().wait()\n"
    )
    assert '"name":"worker"' in said
    assert "fails" in said
    assert "observe/abort.py" not in said.partition("Fatal")[0]


@pytest.mark.parametrize("where", ["terminate()", "abort_in_a_thread_of_c(); threading.Event().wait()"])
def test_an_inspection_that_takes_too_long_does_not_prevent_the_abort(where: str) -> None:
    aborted(f"abort.watch(threading.Event().wait)\n{where}\n")


def test_destroying_a_group_that_may_hold_the_gil_delays_nothing() -> None:
    said = aborted(
        "abort.watch(lambda: None)\n"
        "with abort.handler_removed():\n"
        "    abort_in_a_thread_of_c()\n"
        "    with_the_gil.pause()\n"
    )
    assert "aborts" not in said


def test_threads_are_reported_again_after_a_group_is_destroyed() -> None:
    said = aborted("abort.watch(lambda: None)\nwith abort.handler_removed():\n    pass\nterminate()\n")
    assert '"type":"aborts"' in said
