"""A launcher within another one would start a whole job for each of the other's processes."""

from __future__ import annotations

from collections.abc import Mapping

from cpulaunch import launchers, plugins, variables
from cpulaunch.errors import UsageError


def refuse_within_a_launcher(environ: Mapping[str, str]) -> None:
    """Raise UsageError where this process is a rank of a job, or one of several of an srun or mpiexec."""
    if job := environ.get(variables.JOB_ID):
        raise UsageError(
            f"this is a rank of the job {job}, and each of its ranks would start a job",
            hint="start it outside the job",
        )
    # An sbatch script is in no step, and `srun --pty bash` leaves one process to type in.
    if "SLURM_STEP_ID" in environ and "SLURM_PTY_PORT" not in environ:
        _refuse_one_of_several("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", environ)
    for name in plugins.MPIS:
        identity = launchers.load(name).identity
        _refuse_one_of_several("mpiexec", identity.rank, identity.size, environ)


def _refuse_one_of_several(program: str, rank_in: str, size_in: str, environ: Mapping[str, str]) -> None:
    rank, size = environ.get(rank_in, ""), environ.get(size_in, "")
    if rank and size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"this is process {rank} of {size} of an {program} (${size_in}), "
            "and each of them would start a job",
            hint=f"leave out {program}: cpulaunch starts the ranks on all hosts itself (-n {size}: as many)",
        )
