"""Faults of jobs that srun has started: the same as with other launchers, and Slurm's own events."""

from __future__ import annotations

import contextlib
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from support import chaos
from support.chaos import Event, Job, Result
from support.slurm import Queue

Happening = Callable[[Job, int], contextlib.AbstractContextManager[None]]


def _queue(job: Job) -> Queue:
    assert isinstance(job.cluster, Queue)
    return job.cluster


@contextlib.contextmanager
def _kill_srun(job: Job, rank: int) -> Iterator[None]:
    lines = [line for line in job.cluster.processes("login") if re.match(r"login: \d+ srun --overlap", line)]
    job.cluster._inside("login", "kill", "-KILL", lines[0].split()[1])  # srun's child ends with it
    yield


def _scancel(what: str) -> Happening:
    @contextlib.contextmanager
    def cancel(job: Job, rank: int) -> Iterator[None]:
        _queue(job).slurm("scancel", what.format(job=job.env["SLURM_JOB_ID"]))
        yield

    return cancel


@contextlib.contextmanager
def _node_down(job: Job, rank: int) -> Iterator[None]:
    with _queue(job).down(f"node{rank}"):
        yield


@contextlib.contextmanager
def _without_slurmd(job: Job, rank: int) -> Iterator[None]:
    with _queue(job).without_slurmd(f"node{rank}"):
        yield


@contextlib.contextmanager
def _interrupted_without_slurmd(job: Job, rank: int) -> Iterator[None]:
    """Interrupt the job while slurmd is missing.  Its ranks go on, and can be ended."""
    with _queue(job).without_slurmd(f"node{rank}"):
        job.signal(signal.SIGINT)
        yield


REPLACED = {
    "packets dropped at start": {"said": ("node{rank}: no answer within 7 s",)},
    "packets dropped at start, no preflight": {
        "said": (
            chaos.NOT_STARTED,
            "its agent did not connect within 6 s",
        )  # Slurm takes ten seconds to report it
    },
}

EVENTS = {
    **{
        name: replace(event, **REPLACED.get(name, {}))
        for name, event in chaos.EVENTS.items()
        if not event.for_good and event.launchers == chaos.LAUNCHERS  # srun has no connections of ssh
    },
    "srun killed": Event("sleep", "", 137, ("srun got SIGKILL, not from cpulaunch",), _kill_srun),
    "scancel of the step": Event(
        "sleep",
        "",
        137,
        ("Slurm cancelled the step",),
        _scancel("{job}.0"),
        options=("--skip-preflight",),  # with the check of the nodes, step 0 would be the check
    ),
    "scancel of the allocation": Event(
        "sleep", "", 143, ("SIGTERM (ended by another program or the batch system)",), _scancel("{job}")
    ),
    "node set down": Event(
        "sleep",
        "",
        4,
        ("host node{rank} was lost", "the batch system reports that node{rank} has failed"),
        _node_down,
    ),
    "slurmd killed": Event("sleep", "", 130, ("interrupted after",), _interrupted_without_slurmd),
    "slurmd missing at start": Event(
        "sleep", "", 3, ("node{rank}: no answer within 7 s",), _without_slurmd, at_start=True
    ),
}


def run(queue: Queue, directory: Path, name: str, rank: int, moment: float = 0) -> Result:
    """Inject the event ``name`` into ``rank``, or its host, in a new job in a separate allocation."""
    with queue.allocation("--nodes=4") as allocation:
        options = ["--launcher", "slurm"]
        return chaos.happens(EVENTS[name], queue, directory, options, rank, moment, allocation)


def main(rounds: int, only: str, dice: random.Random) -> int:
    wrong = 0
    with Queue(("login", *chaos.HOSTS)) as queue:
        for name, event in EVENTS.items():
            if only not in name:
                continue

            def once(directory: Path, rank: int, name: str = name) -> Result:
                return run(queue, directory, name, rank, dice.random())

            wrong += chaos.timed(name, event, "slurm", rounds, dice, once)
    return 1 if wrong else 0
