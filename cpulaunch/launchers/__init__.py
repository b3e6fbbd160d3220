"""Launchers start the agents.  Each kind has a module, which is imported when the launcher is used.

The interface is `base.Launcher`.  Another package can provide an instance of it as an entry point in the
group ``cpulaunch.launchers``; ``--launcher NAME`` then accepts the entry point's name.
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
    """Load the launcher ``name``.  Raises UsageError if there is none, or if it is no valid `Launcher`."""
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
    """Load the launcher for a value of the setting ``mpi.flavour``; ``auto`` means the preferred MPI."""
    return cast("Mpiexec", load(MPIS[0] if flavour == "auto" else flavour))
