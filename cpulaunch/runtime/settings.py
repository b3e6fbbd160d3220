"""The training settings, which the launcher passes to a rank in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from cpulaunch import variables
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.settings import Table


@dataclass(frozen=True)
class TrainingSettings:
    """A rank's training settings; the defaults apply outside of a cpulaunch job.

    ``backend`` and ``precision`` are None if neither the plan nor the user has chosen one.  ``bucket_mb`` is
    in MB (2²⁰ bytes), or None for torch's default.  ``in_job``: this process is a rank of a cpulaunch job.
    ``precision_is_planned``: the plan, not the user, chose the precision.
    """

    in_job: bool = False
    backend: str | None = None
    precision: str | None = None
    engine: str = "auto"
    compile: bool = False
    compress_gradients: str = "none"
    bucket_mb: int | None = None
    static_graph: bool = False
    as_written: bool = False
    precision_is_planned: bool = False
    strict: bool = False


def training_settings(environ: Mapping[str, str] = os.environ) -> TrainingSettings:
    """Return this rank's settings.  Raises UsageError if a variable has an invalid value."""
    precision = rank_setting(Table.training.precision, environ)
    bucket = rank_setting(Table.training.bucket_mb, environ)
    return TrainingSettings(
        in_job=variables.JOB_ID in environ,
        backend=rank_setting(Table.training.backend, environ) if environ.get(variables.BACKEND) else None,
        precision=None if precision == "auto" else precision,
        engine=rank_setting(Table.training.engine, environ),
        compile=rank_setting(Table.training.compile, environ),
        compress_gradients=rank_setting(Table.training.compress_gradients, environ),
        bucket_mb=None if bucket == "auto" else bucket,
        static_graph=rank_setting(Table.training.static_graph, environ),
        as_written=rank_setting(Table.training.as_written, environ),
        strict=rank_setting(Table.training.strict, environ),
        precision_is_planned=variables.PRECISION_IS_PLANNED in environ,
    )
