"""Who am I?  Each starter tells a process its rank by variables of its own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cpulaunch import variables
from cpulaunch.errors import HostError


class Names(NamedTuple):
    """The variables by which one starter says who a process is."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_HYDRA = Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

STARTERS = {
    "local": Names(*variables.LOCAL_IDENTITY),
    "intel": _HYDRA,
    "mpich": _HYDRA,
    "openmpi": Names(
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


def identify(starter: str, environ: Mapping[str, str]) -> Identity:
    """Read this process's identity.  HostError where the starter said nothing, or nonsense."""
    names = STARTERS[starter]

    def read(name: str) -> int:
        try:
            return int(environ[name])
        except (KeyError, ValueError):
            raise HostError(
                f"{starter} was to start this process, but {name} is {environ.get(name, 'not set')}",
                hint="is another MPI's mpiexec, or another launcher, in between?",
            ) from None

    return Identity(read(names.rank), read(names.size), read(names.local_rank), read(names.local_size))
