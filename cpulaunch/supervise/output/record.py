"""Read the files in the directory of a running or an ended job."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from cpulaunch.metric_line import LARGEST
from cpulaunch.model.names import INSTANCE, RANKS, Names
from cpulaunch.supervise.control.registry import CONTROL_FILE, is_gone, read_contact
from cpulaunch.supervise.job.outcome import Failure, Metric

OUTCOME, PLAN, EVENTS = "outcome.json", "plan.json", "events.jsonl"

MAX_DOCUMENT = 256 << 20
"""Maximum bytes of a plan or an outcome.  For a thousand hosts, a file has a few megabytes."""

_FIGURES = ("ranks", "values", "mean", "median", "p99", "least", "most")
_JOB_ID = re.compile(r"(\d{8}-\d{6})-[0-9a-f]{8,}")


class State(Enum):
    """Whether a job runs.

    ``KILLED``: the launcher has ended without writing an outcome.  ``SILENT``: there is no outcome, and the
    directory doesn't show whether the launcher still runs.
    """

    RUNNING = "running"
    ENDED = "ended"
    KILLED = "launcher killed"
    SILENT = "silent"


def state_of(directory: Path) -> State:
    if (directory / OUTCOME).exists():
        return State.ENDED
    if contact := read_contact(directory):
        return State.KILLED if is_gone(contact) else State.RUNNING
    return State.SILENT


def is_job(directory: Path) -> bool:
    return any((directory / name).exists() for name in (OUTCOME, PLAN, CONTROL_FILE))


def names_of(directory: Path) -> Names:
    """Return the words for the job's programs, or ``RANKS`` if the plan cannot be read."""
    return names_in(read_document(directory / PLAN) or {})


def names_in(plan: Mapping[str, Any]) -> Names:
    instances = plan.get("instances")
    if not isinstance(instances, dict):
        return RANKS
    return Names(INSTANCE, int(_number(instances.get("first")) or 0))


def ranks_of(directory: Path) -> list[int]:
    """Return all ranks of the job, according to its plan or its outcome; empty if neither can be read."""
    planned = _number((read_document(directory / PLAN) or {}).get("world_size")) or 0
    ended = len(documents((read_document(directory / OUTCOME) or {}).get("ranks")))
    return list(range(max(int(planned), ended)))


def jobs_below(directory: Path) -> list[Path]:
    """Return ``directory`` if it is a job's directory, else the jobs directly below it, the newest first."""
    if is_job(directory):
        return [directory]
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    except OSError:
        return []
    found = (directory / name for name in names)
    return sorted(filter(is_job, found), key=age, reverse=True)


def read_document(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file; None if that fails."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            document = json.loads(file.read(MAX_DOCUMENT))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the job's events in order.  Lines that cannot be read are skipped."""
    try:
        with (directory / EVENTS).open("rb") as file:
            for line in file:
                try:
                    document = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(document, dict):
                    yield document
    except OSError:
        return


def age(directory: Path) -> tuple[str, float]:
    """Return a key that sorts jobs by their start: the second in the job's id, and the plan's mtime."""
    begun = _JOB_ID.fullmatch(directory.name)
    for path in (directory / PLAN, directory):
        with contextlib.suppress(OSError):
            return (begun[1] if begun else "", path.stat().st_mtime)
    return ("", 0.0)


MAX_WHY = 100
"""Maximum characters of a failure in lists of jobs and reports."""


class Ended(NamedTuple):
    """How a job has ended, read from its ``outcome.json``.

    ``why`` is the first failure.  ``seconds`` is the duration of the job.  ``steps`` is the
    number of the last attempt's last step.  ``rate`` is the average number of steps per second over the
    duration of all attempts.  Both are None if no step was observed.
    """

    kind: str
    why: str
    seconds: float
    hosts: int
    ranks: int
    restarts: int
    steps: int | None
    rate: float | None
    metrics: tuple[Metric, ...] = ()

    @property
    def brief(self) -> str:
        """``why`` in one line of at most ``MAX_WHY`` characters."""
        return self.why[:MAX_WHY].replace("\n", " ") + ("…" if len(self.why) > MAX_WHY else "")


def ended(outcome: Mapping[str, Any], names: Names = RANKS) -> Ended:
    """Return the end of a job from its outcome.

    If the document lacks keys, because another version has written it, the values are 0, None or empty.
    """
    ranks, attempts = documents(outcome.get("ranks")), documents(outcome.get("attempts"))
    made = [_number(attempt.get("steps")) for attempt in attempts]
    seconds = sum(_number(attempt.get("seconds")) or 0.0 for attempt in attempts)
    steps = made[-1] if made else None
    if steps is not None:
        steps += _number(attempts[-1].get("resumed_from")) or 0
    rate = sum(filter(None, made)) / seconds if seconds and steps else None
    return Ended(
        kind=str(outcome.get("kind")),
        why=why_failed(outcome, names),
        seconds=_number(outcome.get("seconds")) or 0.0,
        hosts=len({str(rank.get("host")) for rank in ranks}),
        ranks=len(ranks),
        restarts=int(_number(outcome.get("restarts")) or 0),
        steps=None if steps is None else int(steps),
        rate=rate,
        metrics=tuple(_metrics(outcome.get("metrics"))),
    )


def _metrics(value: object) -> Iterator[Metric]:
    for each in documents(value):
        ranks, values, *figures = (_number(each.get(name)) for name in _FIGURES)
        known = [figure for figure in figures if figure is not None]
        if ranks and values and len(known) == len(figures):
            name, unit, total = str(each.get("name")), str(each.get("unit") or ""), _number(each.get("total"))
            mean, median, p99, least, most = known
            part = _number(each.get("sample"))
            sample = None if part is None else int(part)
            yield Metric(name, unit, int(ranks), int(values), total, mean, median, p99, least, most, sample)


def why_failed(outcome: Mapping[str, Any], names: Names = RANKS) -> str:
    """Return the first failure in one line: ``rank 3 on node3: ValueError: …``.  Empty if there is none."""
    failure = outcome.get("first_failure")
    if not isinstance(failure, dict):
        return ""
    return Failure.from_json(failure).in_a_line(str(outcome.get("kind")), names)


def documents(value: object) -> list[dict[str, Any]]:
    """Return the JSON objects of a list; empty if ``value`` is not a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _number(value: object) -> float | None:
    """Return ``value`` if it is a number of a possible size, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= LARGEST else None  # NaN fails this, too
