"""Launchers, which start the agents: one module for each kind, found by name and imported when used.

``base`` has the interface.  A package can add a launcher by an entry point in the group
``cpulaunch.launchers`` whose object is a `base.Launcher`; ``--launcher NAME`` then accepts its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cpulaunch import plugins
from cpulaunch.errors import UsageError

MPIS = plugins.MPIS

if TYPE_CHECKING:
    from cpulaunch.launchers.base import Launcher
    from cpulaunch.launchers.mpi import Mpiexec


def load(name: str) -> Launcher:
    """The launcher called ``name``.  Raises UsageError if there is none, or if it is no valid `Launcher`."""
    from cpulaunch.launchers.base import Launcher

    launcher = plugins.load(plugins.LAUNCHERS, name)
    if not isinstance(launcher, Launcher):
        raise UsageError(
            f"{name!r} of {plugins.LAUNCHERS} is not a Launcher, but of type {type(launcher).__name__}",
            hint="an entry point must name an instance of a class derived from launchers.base.Launcher",
        )
    if missing := [part for part in ("name", "title", "identity") if not hasattr(launcher, part)]:
        raise UsageError(f"{name!r} of {plugins.LAUNCHERS} is not a launcher: it lacks {', '.join(missing)}")
    return launcher


def load_mpi(flavour: str) -> Mpiexec:
    """The launcher for a value of the setting ``mpi.flavour``; ``auto`` is the preferred one."""
    return cast("Mpiexec", load(MPIS[0] if flavour == "auto" else flavour))
