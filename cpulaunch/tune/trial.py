"""Runs a trial: starts `cpulaunch run` as a child process, and ends it when its rate is known."""

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
"""Name of the file with a trial's output."""

POLL = 0.2
"""Seconds between reads of a trial's telemetry."""

MIN_SECONDS = 2.0
"""Minimum seconds for which each rank is measured."""


class Goal(NamedTuple):
    """When a trial ends: with 95 % confidence, its rate is known within ``tolerance``, or below ``to_beat``.

    ``tolerance`` is a fraction of the rate, ``to_beat`` a rate per second.  After ``enough`` seconds, a rate
    of any precision suffices; after ``limit`` seconds, the trial fails.
    """

    tolerance: float
    to_beat: float
    enough: float
    limit: float


@dataclass(frozen=True)
class Runner:
    """Runs trials with the ``options`` of `cpulaunch run`; ``program`` is the script with its arguments."""

    options: Sequence[str]
    program: Sequence[str]
    environ: dict[str, str]

    def run(self, values: Values, ranks: int, goal: Goal) -> Trial:
        """Run a trial of ``values`` on ``ranks`` ranks.  Leaves no process and no file behind."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="cpulaunch-tune-") as name:
            directory = Path(name)
            options = [*self.options, *self._options(values, directory)]
            # The output goes to a file, because nothing reads a pipe while the trial runs.
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
    """Wait until ``goal`` is reached or the trial ends; return the rate, if it is known."""
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
    """Reads new rows of a trial's telemetry."""

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
    """Return a line that says why a trial has no rate."""
    if code == 0:
        return "the script ended before its rate was known; it needs more steps"
    if code == 128 + signal.SIGTERM:
        return f"it made too few steps in {limit:.0f} s"
    for path in (directory / "runs").glob(f"*/{OUTCOME}"):
        if why := why_failed(read_document(path) or {}):
            return why
    lines = (directory / OUTPUT).read_text(errors="replace").strip().splitlines()
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("cpulaunch: error: ")]
    return (errors or lines[-1:] or [f"exit code {code}"])[0]
