"""Objects found by name: those of cpulaunch by a table, others by the entry points of installed packages.

Nothing is imported before it is asked for by its name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cpulaunch.errors import UsageError
from cpulaunch.wording import did_you_mean

LAUNCHERS = "cpulaunch.launchers"
ENGINES = "cpulaunch.engines"
QUEUES = "cpulaunch.queues"

BUILT_IN = {
    LAUNCHERS: {
        "local": "cpulaunch.launchers.local:LOCAL",
        "intel": "cpulaunch.launchers.hydra:INTEL",
        "mpich": "cpulaunch.launchers.hydra:MPICH",
        "openmpi": "cpulaunch.launchers.openmpi:OPENMPI",
        "slurm": "cpulaunch.launchers.srun:SRUN",
        "ssh": "cpulaunch.launchers.ssh:SSH",
    },
    QUEUES: {
        "slurm": "cpulaunch.queues.slurm.queue:SLURM",
        "kubernetes": "cpulaunch.queues.kubernetes.queue:KUBERNETES",
    },
    ENGINES: {
        "ipex": "cpulaunch.runtime.change.engines.ipex:ENGINE",
        "native": "cpulaunch.runtime.change.engines.native:ENGINE",
        "torch": "cpulaunch.runtime.change.engines.native:TORCH",
    },
}
"""Group of entry points → name → where the object is.  Settings offer these names."""

ENGINE_PACKAGES = {"ipex": "intel_extension_for_pytorch"}
"""Engine → the package that it needs besides torch, which may not be installed."""

MPIS = ("intel", "mpich", "openmpi")
"""The launchers that the setting ``mpi.flavour`` chooses from, the preferred first."""


def load(group: str, name: str) -> Any:
    """The object called ``name`` in ``group``: a built-in one, or an entry point's.

    Raises UsageError where there is no such name, or its module can't be imported.
    """
    built_in = BUILT_IN[group]
    if name in built_in:
        module, _, attribute = built_in[name].partition(":")
        return getattr(import_module(module), attribute)
    entries = {entry.name: entry for entry in entry_points(group)}
    if name not in entries:
        known = [*built_in, *entries]
        raise UsageError(
            f"nothing is called {name!r} in {group}{did_you_mean(name, known)}",
            hint=f"known: {', '.join(known)}",
        )
    try:
        return entries[name].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name!r} of {group} ({entries[name].value}) can't be imported: {error}") from error


def names(group: str) -> list[str]:
    """All names in ``group``, the built-in ones first."""
    return list(dict.fromkeys([*BUILT_IN[group], *(entry.name for entry in entry_points(group))]))


def entry_points(group: str) -> list[Any]:
    """What installed packages offer in ``group``."""
    from importlib import metadata  # takes 15 ms, and most jobs name none of these

    return list(metadata.entry_points(group=group))
