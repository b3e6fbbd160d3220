"""Runs a trial: `cpulaunch run` as a child process, which is ended when its rate is known."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cpulaunch import variables
from cpulaunch.config.config import Config
from cpulaunch.config.setting import Setting
from cpulaunch.supervise.nested import nested_run
from cpulaunch.supervise.output.record import OUTCOME, read_document, why_failed
from cpulaunch.tune.rate import Meter, Rate
from cpulaunch.tune.search import Trial
from cpulaunch.tune.space import Values

OUTPUT = "output"
"""File in a trial's directory for its output."""

POLL = 0.2
"""Seconds between two looks at a trial's telemetry."""

MIN_SECONDS = 2.0
"""Minimum seconds for which each rank is measured."""


class Goal(NamedTuple):
    """When a trial ends: its rate is known within ``tolerance``, or surely below ``to_beat``.

    Both with 95 % confidence; ``tolerance`` is a fraction of the rate, ``to_beat`` is per second.  After
    ``enough`` seconds, a rate of any precision counts; after ``limit`` seconds, the trial has failed.
    """

    tolerance: float
    to_beat: float
    enough: float
    limit: float


@dataclass(frozen=True)
class Runner:
    """Runs trials of one job.

    ``options`` are those of `cpulaunch run` in each trial, and ``program`` is the script with its arguments.
    """

    options: Sequence[str]
    program: Sequence[str]
    environ: dict[str, str]

    def run(self, values: Values, ranks: int, goal: Goal) -> Trial:
        """Run ``values`` on ``ranks`` ranks.  Leaves nothing running, and nothing on disk."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="cpulaunch-tune-") as name:
            directory = Path(name)
            options = [*self.options, *self._options(values, directory)]
            # A file instead of pipes, as nothing reads its output while the trial runs.
            with (
                (directory / OUTPUT).open("wb") as output,
                nested_run(options, self.program, output, output, self.environ) as process,
            ):
                rate = _watch(process, directory, ranks, goal)
            why = "" if rate else _why(process.returncode, directory, goal.limit)
        return Trial(values, rate, why, time.monotonic() - began)

    def _options(self, values: Values, directory: Path) -> Iterator[str]:
        own: dict[Setting[Any], Any] = {
            Config.output.log_dir: str(directory / "runs"),
            Config.watch.max_restarts: 0,
        }
        for setting, value in {**values, **own}.items():
            yield f"--set={setting.key}={setting.kind.to_text(value)}"
        yield f"--env={variables.TUNING}=1"


def _watch(process: subprocess.Popen[bytes], directory: Path, ranks: int, goal: Goal) -> Rate | None:
    """Wait until the rate is known well enough, the trial has ended, or its time is up."""
    began, meter, rows = time.monotonic(), Meter(), _Rows(directory / "runs")
    while True:
        ended = process.poll() is not None
        meter.add(rows.new())
        rate, seconds = meter.rate(ranks), time.monotonic() - began
        if ended or seconds > goal.limit:
            return rate if not ended or process.returncode == 0 else None
        if (
            rate
            and meter.seconds >= MIN_SECONDS
            and (rate.spread <= goal.tolerance or rate.most < goal.to_beat or seconds > goal.enough)
        ):
            return rate
        time.sleep(POLL)


class _Rows:
    """The rows that a trial's telemetry has gained since the last look."""

    def __init__(self, runs: Path) -> None:
        self._runs, self._rest = runs, b""
        self._at = 0

    def new(self) -> Iterator[dict[str, Any]]:
        for path in self._runs.glob("*/telemetry.jsonl"):
            with path.open("rb") as file:
                file.seek(self._at)
                text = file.read()
            self._at += len(text)
            *lines, self._rest = (self._rest + text).split(b"\n")
            yield from (json.loads(line) for line in lines)


def _why(code: int, directory: Path, limit: float) -> str:
    """Return why a trial has no rate, in a line."""
    if code == 0:
        return "it ended before its rate was known: it needs more steps"
    if code == 128 + signal.SIGTERM:
        return f"too few steps in {limit:.0f} s"
    for path in (directory / "runs").glob(f"*/{OUTCOME}"):
        if why := why_failed(read_document(path) or {}):
            return why
    lines = (directory / OUTPUT).read_text(errors="replace").strip().splitlines()
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("cpulaunch: error: ")]
    return (errors or lines[-1:] or [f"exit code {code}"])[0]
