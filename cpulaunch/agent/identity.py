"""Who am I?  Each starter tells a process its rank by variables of its own names."""

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
"""Starter → its names.  Only the plan's starter is looked at: others' variables may be lying about."""


class Identity(NamedTuple):
    """One process's place in the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def identify(launcher: str, names: IdentityVariables, environ: Mapping[str, str]) -> Identity:
    """This process's identity, which ``launcher`` tells it by variables of these ``names``.

    Raises HostError where one of them is not set, or holds no number.
    """

    def read(name: str) -> int:
        try:
            return int(environ[name])
        except (KeyError, ValueError):
            raise HostError(
                f"{launcher} was to start this process, but {name} is {environ.get(name, 'not set')}",
                hint="is another MPI's mpiexec, or another launcher, in between?",
            ) from None

    return Identity(read(names.rank), read(names.size), read(names.local_rank), read(names.local_size))
