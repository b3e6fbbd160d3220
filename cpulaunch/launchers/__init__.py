"""What starts the agents: one module for each kind of launcher, found by name and loaded when used.

``base`` is the protocol.  A package adds a launcher by an entry point in the group ``cpulaunch.launchers``
whose object is a `base.Launcher`; ``--launcher NAME`` then takes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cpulaunch import plugins

if TYPE_CHECKING:
    from cpulaunch.launchers.base import Launcher
    from cpulaunch.launchers.mpi import Mpiexec

GROUP = "cpulaunch.launchers"

BUILT_IN = {
    "local": "cpulaunch.launchers.local:LOCAL",
    "intel": "cpulaunch.launchers.hydra:INTEL",
    "mpich": "cpulaunch.launchers.hydra:MPICH",
    "openmpi": "cpulaunch.launchers.openmpi:OPENMPI",
}

MPIS = ("intel", "mpich", "openmpi")
"""Those that the setting ``mpi.flavour`` chooses from, the preferred first."""


def load(name: str) -> Launcher:
    """The launcher called ``name``.  Raises UsageError where there is none."""
    return cast("Launcher", plugins.load(GROUP, name, BUILT_IN))


def load_mpi(flavour: str) -> Mpiexec:
    """The launcher of a value of ``mpi.flavour``; ``auto`` gives the preferred one."""
    return cast("Mpiexec", load(MPIS[0] if flavour == "auto" else flavour))
