"""Which variables the ranks get: what we plan, unless the user has said otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cpulaunch.plan.binding import Binding, Seat

AFFINITY = "CCL_WORKER_AFFINITY"

# What belongs to a host, a login or a job step, and would only mislead on another host.
_STAYS_HERE = ("BASH_FUNC_", "SSH_", "XDG_", "DBUS_", "SLURM_", "PBS_", "PMI", "PALS_", "PRTE_", "OMPI_COMM_")
_STAYS_HERE_EXACTLY = {"_", "PWD", "OLDPWD", "SHLVL", "HOSTNAME", "DISPLAY", "TERM_SESSION_ID", "TMUX", "STY"}


def threads_environment(seat: Seat) -> dict[str, str]:
    """The variables that follow from a rank's own seat."""
    return {"OMP_NUM_THREADS": str(seat.threads)}


def workers_environment(binding: Binding) -> dict[str, str]:
    """The variables that follow from all seats of a host: one flat list of CPUs for oneCCL's workers."""
    affinity = binding.worker_affinity
    return {AFFINITY: ",".join(map(str, affinity))} if affinity else {}


def common(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The entries that all of ``environments`` share."""
    each = iter(environments)
    shared = dict(next(each))
    for environment in each:
        if environment != shared:
            shared = {k: v for k, v in shared.items() if environment.get(k) == v}
    return shared


def to_forward(environ: Mapping[str, str]) -> list[str]:
    """The names of ``environ`` that make sense on other hosts, sorted."""
    return sorted(
        name
        for name in environ
        if name not in _STAYS_HERE_EXACTLY and not name.startswith(_STAYS_HERE) and name.isidentifier()
    )
