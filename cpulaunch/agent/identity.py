"""Which rank a process is.  Each launcher tells it by variables of its own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cpulaunch import variables
from cpulaunch.errors import HostError
from cpulaunch.plan.placement import IdentityVariables

_HYDRA = IdentityVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

STARTERS = {
    "local": IdentityVariables(*variables.LOCAL_IDENTITY),
    "intel": _HYDRA,
    "mpich": _HYDRA,
    "openmpi": IdentityVariables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}
"""Launcher → its names."""


class Identity(NamedTuple):
    """One process's place in the job.  ``local_size`` is None where the launcher doesn't tell it."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None


def identify(names: IdentityVariables, launcher: str, environ: Mapping[str, str]) -> Identity:
    """Read this process's identity from the variables of its launcher, which messages call ``launcher``.

    Only those are looked at, as other launchers' variables may be lying about.  HostError where one is not
    set, or not a number.
    """

    def read(name: str) -> int:
        try:
            return int(environ[name])
        except (KeyError, ValueError):
            raise HostError(
                f"{launcher} was to start this process, but {name} is {environ.get(name, 'not set')}",
                hint="is another MPI's mpiexec, or another launcher, in between?",
            ) from None

    local_size = read(names.local_size) if names.local_size else None
    return Identity(read(names.rank), read(names.size), read(names.local_rank), local_size)
