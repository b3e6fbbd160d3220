"""The variables by which batch systems and launchers tell a process which rank it is.

Libraries that look for such variables take those of an allocation around the job, or of another launcher,
for the job's own: they see other ranks than there are.  So the ranks get those of their own launcher only.
"""

from __future__ import annotations

from collections.abc import Collection

# One family each; a launcher belongs to the one that it tells the rank by.
_FAMILIES = (
    # Slurm
    (
        "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GTIDS",
        "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
    ),
    # Hydra (Intel MPI, MPICH), and Slurm's own PMI
    (
        "PMI_RANK", "PMI_SIZE", "PMI_ID", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    ),
    # Open MPI (PRRTE)
    (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_NODE_RANK", "PMIX_RANK",
    ),
    # MVAPICH
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    # PALS and ALPS (Cray)
    ("PALS_RANKID", "PALS_NODEID", "PALS_LOCAL_RANKID", "ALPS_APP_PE"),
    # jsrun (Spectrum LSF)
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    # Flux
    ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
)  # fmt: skip


def foreign_claims(own: Collection[str], kept: Collection[str]) -> tuple[str, ...]:
    """The variables to hide from ranks whose launcher tells them who they are by ``own``.

    ``kept`` are those that the user wants them to get nevertheless.
    """
    families = (family for family in _FAMILIES if not set(family) & set(own))
    return tuple(name for family in families for name in family if name not in kept)
