"""Reads a job's directory for its report, with bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from cpulaunch.config.setting import Setting
from cpulaunch.model.names import RANKS, Names
from cpulaunch.report.buckets import Buckets
from cpulaunch.report.secrets import masked, masked_command
from cpulaunch.supervise.job.outcome import signal_name
from cpulaunch.supervise.output.record import (
    OUTCOME,
    PLAN,
    Ended,
    State,
    documents,
    ended,
    names_in,
    read_document,
    read_events,
    state_of,
)

TELEMETRY = "telemetry.jsonl"
TRACE_TEXTS = ("trace.txt", *(f"trace-{number}.txt" for number in range(2, 6)))
"""Files in which ``cpulaunch profile`` writes summaries of the first five traces."""

AT_ONCE = 4096
"""Number of rows read at a time."""

MAX_LINE = 1 << 16
"""Maximum bytes of a row; longer rows are skipped."""

MAX_TEXT = 1 << 16
"""Maximum characters of a text in the report."""


@dataclass(frozen=True)
class Mark:
    """A failure, stall or restart (``kind``), in seconds since the job's start."""

    seconds: float
    kind: str
    text: str


@dataclass(frozen=True)
class Rank:
    """A rank's placement."""

    rank: int
    host: str
    cores: str
    comm_cores: str
    numa_nodes: str
    threads: int


@dataclass(frozen=True)
class Job:
    """The contents of a job's directory."""

    name: str
    state: State
    end: Ended | None  # None if the job has not ended, or left no outcome
    program: str
    settings: tuple[tuple[str, str, str], ...]  # key, value, origin
    ranks: tuple[Rank, ...]
    transport: str
    marks: tuple[Mark, ...]
    head: Mapping[str, Any]  # first line of its telemetry
    buckets: Buckets
    trace: str  # summaries of its traces
    notes: tuple[str, ...] = field(default=())
    names: Names = RANKS

    def setting(self, setting: Setting[Any]) -> str | None:
        """Return the value of a setting as text; None if it is unknown."""
        return next((text for name, text, _ in self.settings if name == setting.key), None)


def read_job(directory: Path) -> Job:
    """Read a job's directory, in which files may be missing."""
    outcome = read_document(directory / OUTCOME)
    plan = read_document(directory / PLAN) or {}
    names = names_in(plan)
    end = ended(outcome, names) if outcome else None
    head, buckets = read_telemetry(directory / TELEMETRY)
    return Job(
        name=directory.absolute().name,
        state=state_of(directory),
        end=end,
        program=program_in(plan),
        settings=tuple(_settings(plan)),
        ranks=tuple(_ranks(plan)),
        transport=str(plan.get("transport") or ""),
        marks=tuple(sorted(_marks(directory, end, names), key=lambda mark: mark.seconds)),
        head=head,
        buckets=buckets,
        trace="\n".join(filter(None, (_text(directory / name) for name in TRACE_TEXTS))),
        notes=tuple(masked(str(note)) for note in plan.get("notes") or ()),
        names=names,
    )


def read_telemetry(path: Path) -> tuple[Mapping[str, Any], Buckets]:
    """Read the first line and the rows of ``telemetry.jsonl``.  Both are empty if it can't be read."""
    head: dict[str, Any] = {}
    buckets = Buckets()
    try:
        with path.open("rb") as file:
            while lines := list(islice(iter(lambda: file.readline(MAX_LINE), b""), AT_ONCE)):
                rows = list(_parsed(lines))
                for row in rows[:1] if not head else ():
                    head = row if "schema" in row else {"schema": None}
                buckets.add(rows)
    except OSError:
        pass
    return head, buckets


def _parsed(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of lines; malformed lines are skipped."""
    try:  # all at once, which is faster
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        rows = []
        for line in lines:
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    yield from documents(rows)


def program_in(plan: Mapping[str, Any]) -> str:
    """Return the job's command with masked secrets; empty if the plan lacks it."""
    argv = plan.get("program")
    if not isinstance(argv, list):
        return ""
    return masked_command([str(word) for word in (argv[1:] if plan.get("python") else argv)])


def _settings(plan: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and origin.  Values in ``env`` are secret, so only their names are shown."""
    for row in documents(plan.get("settings")):
        key, value = str(row.get("key")), row.get("value")
        if key == "env" and isinstance(value, dict):
            text = ", ".join(f"{name}=…" for name in value)
        else:
            text = masked(value if isinstance(value, str) else json.dumps(value))
        yield key, text, masked(str(row.get("origin")))


def _ranks(plan: Mapping[str, Any]) -> Iterator[Rank]:
    for host in documents(plan.get("hosts")):
        for rank in documents(host.get("ranks")):
            yield Rank(
                rank=int(rank.get("rank") or 0),
                host=str(host.get("host")),
                cores=str(rank.get("cores") or ""),
                comm_cores=str(rank.get("comm_cores") or ""),
                numa_nodes=str(rank.get("numa_nodes") or ""),
                threads=int(rank.get("threads") or 0),
            )


def _marks(directory: Path, end: Ended | None, names: Names) -> Iterator[Mark]:
    """Yield stalls, restarts, and the failure that ended each attempt."""
    failed: Mark | None = None
    for event in read_events(directory):
        seconds, kind = event.get("seconds"), event.get("type")
        if not isinstance(seconds, (int, float)):
            continue
        if kind == "stall":
            yield Mark(float(seconds), "stall", masked(str(event.get("text") or "no progress"))[:MAX_TEXT])
        elif kind == "exit" and failed is None and (how := _exit(event, names)):
            failed = Mark(float(seconds), "failure", how)
        elif kind == "restart":
            if failed:
                yield failed
            failed = None
            yield Mark(float(seconds), "restart", f"restart {event.get('restart')}")
    if end and end.why:
        yield Mark(end.seconds, "failure", masked(end.why)[:MAX_TEXT])


def _exit(event: Mapping[str, Any], names: Names) -> str:
    """Describe how a rank has failed; empty if it has not failed, or if the launcher ended it."""
    rank, number, code = event.get("rank"), event.get("signal"), event.get("code")
    if event.get("by_launcher") and not event.get("finished"):
        return ""
    name = names.one(rank) if isinstance(rank, int) else f"a {names.noun}"
    if isinstance(number, int):
        return f"{name} got {signal_name(number)}"
    return f"{name} ended with exit code {code}" if code else ""


def _text(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return masked(file.read(MAX_TEXT))
    except OSError:
        return ""
