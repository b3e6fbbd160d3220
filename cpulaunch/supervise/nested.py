"""Run `cpulaunch run` as a child process, and leave no process behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, TypeAlias

from cpulaunch.supervise.attempts.start import signal_when_orphaned

GRACE = 3.0
"""Seconds that the ranks have to end."""

LAUNCHER_GRACE = 20.0
"""Seconds after ``GRACE`` in which the launcher has to end, before it is killed."""

RUN = (sys.executable, "-m", "cpulaunch", "run")

Stream: TypeAlias = int | IO[bytes] | None


@contextmanager
def nested_run(
    options: Sequence[str],
    program: Sequence[str],
    stdout: Stream,
    stderr: Stream,
    environ: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `cpulaunch run OPTIONS PROGRAM`, and end it, if necessary by force, when the context is left.

    ``environ``: its environment; None for ours.  Ctrl-C reaches only this process, which then ends the job.
    """
    process = subprocess.Popen(
        [*RUN, *options, f"--set=watch.grace_period={GRACE}", *program],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environ,
        start_new_session=True,
        preexec_fn=partial(signal_when_orphaned, signal.SIGTERM),
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job as a user would, or else kill the launcher: its agents then end by themselves."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE + LAUNCHER_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
