"""What a job's directory says of the job, while it runs and ever after."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from cpulaunch.supervise.registry import CONTROL_FILE, is_gone, read_contact

OUTCOME, PLAN, EVENTS = "outcome.json", "plan.json", "events.jsonl"

MAX_DOCUMENT = 256 << 20
"""Bytes of a plan or an outcome: those of a thousand hosts take a few."""

_JOB_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8,}")


class State(Enum):
    """Whether a job runs.

    ``KILLED``: its launcher has ended without saying how the job did.  ``SILENT``: it has not said, and
    nothing tells whether it still runs.
    """

    RUNNING = "running"
    ENDED = "ended"
    KILLED = "launcher killed"
    SILENT = "silent"


def state_of(directory: Path) -> State:
    """Whether the job of this directory runs."""
    if (directory / OUTCOME).exists():
        return State.ENDED
    if contact := read_contact(directory):
        return State.KILLED if is_gone(contact) else State.RUNNING
    return State.SILENT


def is_job(directory: Path) -> bool:
    """Whether this is a job's directory."""
    return any((directory / name).exists() for name in (OUTCOME, PLAN, CONTROL_FILE))


def jobs_below(directory: Path) -> list[Path]:
    """The job of ``directory``, or those directly below it, the newest first."""
    if is_job(directory):
        return [directory]
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    except OSError:
        return []
    found = (directory / name for name in names)
    return sorted(filter(is_job, found), key=_age, reverse=True)


def read_document(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none that can be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            said = json.loads(file.read(MAX_DOCUMENT))
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """What has happened in the job, one after the other."""
    try:
        with (directory / EVENTS).open("rb") as file:
            for line in file:
                try:
                    said = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(said, dict):
                    yield said
    except OSError:
        return


def _age(directory: Path) -> tuple[str, float]:
    """What sorts jobs by their start: ids begin with it."""
    name = directory.name
    try:
        changed = directory.stat().st_mtime
    except OSError:
        changed = 0.0
    return (name if _JOB_ID.fullmatch(name) else "", changed)
