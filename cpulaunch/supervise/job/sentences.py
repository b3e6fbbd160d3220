"""Causes in words.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cpulaunch.cause import Cause, Kind
from cpulaunch.supervise.job.outcome import signal_name


def sentence(cause: Cause) -> str:
    """Describe a cause in words; empty if the failure needs no explanation."""
    words = _SENTENCES.get(cause.kind)
    return words(cause) if words else ""


def _killed_by_kernel(cause: Cause) -> str:
    if cause.detail:
        return f"the kernel ran out of memory and says: {cause.detail}"
    return f"probably out of memory: the kernel has just killed a process for this reason ({_peak(cause)})"


def _peak(cause: Cause) -> str:
    return f"peak {cause.memory or 0:.2f} GiB"


def _not_started(cause: Cause) -> str:
    where = f" on {cause.host}" if cause.host else ""
    return f"it couldn't be started{where}: {cause.detail}"


def _got(cause: Cause) -> str:
    with_it = ", and its agent ended with it" if cause.rank is not None else ""
    return f"{cause.program} got {signal_name(cause.signal or 0)}, not from us{with_it}"


_SENTENCES: Mapping[Kind, Callable[[Cause], str]] = {
    Kind.UNEXPLAINED_EXIT: lambda cause: (
        "neither by an exception nor by sys.exit: the script or a library called os._exit, or exit in C"
    ),
    Kind.OUT_OF_MEMORY: _killed_by_kernel,
    Kind.KILLED: lambda cause: f"perhaps out of memory ({_peak(cause)})",
    Kind.KILLED_BY_OTHERS: lambda cause: (
        f"not out of memory ({_peak(cause)}): a person, the batch system or another program sent it"
    ),
    Kind.HOST_LOST: lambda cause: (
        f"no sign of life from host {cause.host} for {cause.seconds:.0f} s: "
        "it, its network or its agents have stopped"
    ),
    Kind.HOST_FAILED: lambda cause: f"the batch system says that {cause.host} has failed, or was set down",
    Kind.AGENT_KILLED: lambda cause: "its agent ended without a report",
    Kind.AGENT_SIGNALED: lambda cause: (
        f"its agent got signal {cause.signal}, from mpiexec or a batch system, not from us"
    ),
    Kind.AGENT_MALFORMED: lambda cause: f"its agent sent malformed data: {cause.detail}",
    Kind.AGENT_ENDED: lambda cause: "its agent ended before it connected to the launcher",
    Kind.AGENT_SILENT: lambda cause: (
        f"no sign of life within {cause.seconds:.0f} s of the last rank to connect"
    ),
    Kind.NOT_STARTED: _not_started,
    Kind.REFUSED: lambda cause: cause.detail or "",
    Kind.VERSIONS_DIFFER: lambda cause: (
        f"the agent on {cause.host} has {cause.detail}: install the same cpulaunch on all hosts"
    ),
    Kind.LAUNCHER_KILLED: _got,
    Kind.LAUNCHER_ENDED: lambda cause: (
        f"{cause.program} ended with code {cause.exit_code} before {cause.detail} had reported"
    ),
    Kind.CANCELLED: lambda cause: cause.detail or "",
    Kind.STALLED: lambda cause: f"no progress for {cause.seconds:.0f} s: {cause.detail}",
}
