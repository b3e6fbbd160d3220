"""A launcher within another one would start a whole job for each of the other's processes."""

from __future__ import annotations

from collections.abc import Mapping

from cpulaunch import launchers, plugins, variables
from cpulaunch.errors import UsageError


def refuse_within_a_launcher(environ: Mapping[str, str]) -> None:
    """Raise UsageError where this process is a rank of a job, or one of several of an mpiexec."""
    if job := environ.get(variables.JOB_ID):
        raise UsageError(
            f"this is a rank of the job {job}, and each of its ranks would start a job",
            hint="start it outside of the job",
        )
    for name in plugins.MPIS:
        identity = launchers.load(name).identity
        rank, size = environ.get(identity.rank, ""), environ.get(identity.size, "")
        if rank and size.isdecimal() and int(size) > 1:
            raise UsageError(
                f"this is process {rank} of {size} of an mpiexec (${identity.size}), "
                "and each of them would start a job",
                hint=f"leave out mpiexec: cpulaunch run -n {size} train.py",
            )
