"""Finds launchers, engines and queues by name: built-in ones, and entry points of installed packages.

An object's module is imported when the object is loaded.
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
        "trainjob": "cpulaunch.queues.kubernetes.queue:TRAINER",
    },
    ENGINES: {
        "ipex": "cpulaunch.runtime.change.engines.ipex:ENGINE",
        "native": "cpulaunch.runtime.change.engines.native:ENGINE",
        "torch": "cpulaunch.runtime.change.engines.native:TORCH",
    },
}
"""Group of entry points → name of a built-in object → its MODULE:ATTRIBUTE."""

ENGINE_PACKAGES = {"ipex": "intel_extension_for_pytorch"}
"""Engine → package that it needs in addition to torch."""

MPIS = ("intel", "mpich", "openmpi")
"""Values of the setting ``mpi.flavour``, the preferred first."""


def load(group: str, name: str) -> Any:
    """Return the object called ``name`` in ``group``.

    Raises UsageError if there is none, or if the entry point can't be imported.
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
    """Return all names in ``group``, built-in ones first."""
    return list(dict.fromkeys([*BUILT_IN[group], *(entry.name for entry in entry_points(group))]))


def entry_points(group: str) -> list[Any]:
    """Return the entry points of installed packages in ``group``."""
    from importlib import metadata  # takes 15 ms, and is rarely needed

    return list(metadata.entry_points(group=group))
