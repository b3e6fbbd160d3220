"""Sinks for a job's telemetry, selected by the setting ``watch.telemetry``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpulaunch.plan.plan import Plan
    from cpulaunch.supervise.output.directory import JobDirectory
    from cpulaunch.supervise.telemetry.rows import Sink


def make_sinks(
    plan: Plan, directory: JobDirectory, job_id: str, warn: Callable[[str], None]
) -> Sequence[Sink]:
    """Create the sinks that the plan's setting names.

    Raises UsageError if tensorboardX is missing, and HostError if the Prometheus port cannot be used.
    """
    wanted = plan.settings.watch.telemetry
    if wanted == "none":
        return ()
    from cpulaunch.supervise.telemetry.sinks.file import TelemetryFile

    began = round(time.time(), 3)
    facts = {"job": job_id, "world_size": plan.world_size, "began": began}
    sinks: list[Sink] = [TelemetryFile(directory, facts, warn)]
    if wanted.tensorboard:
        from cpulaunch.supervise.telemetry.sinks.tensorboard import Scalars, TensorBoardSink

        sinks.append(TensorBoardSink(directory, Scalars(plan.world_size), began, warn))
    if wanted.prometheus:
        from cpulaunch.supervise.telemetry.sinks.prometheus import Metrics, PrometheusSink

        hosts = [host.host for host in plan.hosts for _ in host.ranks]
        sinks.append(PrometheusSink(*wanted.prometheus, Metrics(job_id, hosts)))
    return sinks
