"""Which rank a process is.  Each launcher tells it by variables of its own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cpulaunch.errors import HostError
from cpulaunch.plan.placement import IdentityVariables


class Identity(NamedTuple):
    """One process's place in the job.  ``local_size`` is None where the launcher doesn't tell it."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None


def identify(launcher: str, names: IdentityVariables, environ: Mapping[str, str]) -> Identity:
    """This process's identity, which ``launcher`` tells it by variables of these ``names``.

    Other launchers' variables may be lying about.  Raises HostError where one of them is not set, or holds no
    number.
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
