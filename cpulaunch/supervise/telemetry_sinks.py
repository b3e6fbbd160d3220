"""Where a job's telemetry goes: ``watch.telemetry``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpulaunch.plan.plan import Plan
    from cpulaunch.supervise.directory import JobDirectory
    from cpulaunch.supervise.telemetry import Sink


def make_sinks(
    plan: Plan, directory: JobDirectory, job_id: str, warn: Callable[[str], None]
) -> Sequence[Sink]:
    """Those that the plan's setting names.  They cost nothing until there are rows."""
    if plan.setting("watch.telemetry") == "none":
        return ()
    from cpulaunch.supervise.telemetry_file import TelemetryFile

    facts = {"job": job_id, "world_size": plan.world_size, "began": round(time.time(), 3)}
    return (TelemetryFile(directory, facts, warn),)
