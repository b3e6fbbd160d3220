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
        return f"killed by the kernel because memory ran out: {cause.detail}"
    why = "the kernel has just killed a process because memory ran out"
    return f"probably out of memory: {why} ({_peak(cause)})"


def _peak(cause: Cause) -> str:
    return f"peak {cause.memory or 0:.2f} GiB"


def _not_started(cause: Cause) -> str:
    where = f" on {cause.host}" if cause.host else ""
    return f"it couldn't be started{where}: {cause.detail}"


def _got(cause: Cause) -> str:
    with_it = ", and the rank's agent ended with it" if cause.rank is not None else ""
    return f"{cause.program} got {signal_name(cause.signal or 0)}, not from cpulaunch{with_it}"


_SENTENCES: Mapping[Kind, Callable[[Cause], str]] = {
    Kind.UNEXPLAINED_EXIT: lambda cause: (
        "it ended without an exception or sys.exit: the script or a library called os._exit, or exit in C"
    ),
    Kind.OUT_OF_MEMORY: _killed_by_kernel,
    Kind.KILLED: lambda cause: f"perhaps out of memory ({_peak(cause)})",
    Kind.KILLED_BY_OTHERS: lambda cause: (
        f"not out of memory ({_peak(cause)}): a person, the batch system or another program sent SIGKILL"
    ),
    Kind.HOST_LOST: lambda cause: (
        f"no sign of life from host {cause.host} for {cause.seconds:.0f} s: "
        "the host, its network or its agents have stopped"
    ),
    Kind.HOST_FAILED: lambda cause: f"the batch system reports that {cause.host} has failed or is down",
    Kind.AGENT_KILLED: lambda cause: "its agent ended without a report",
    Kind.AGENT_SIGNALED: lambda cause: (
        f"its agent got signal {cause.signal}, from mpiexec or a batch system, not from cpulaunch"
    ),
    Kind.AGENT_MALFORMED: lambda cause: f"its agent sent malformed data: {cause.detail}",
    Kind.AGENT_ENDED: lambda cause: "its agent ended before it connected to the launcher",
    Kind.AGENT_SILENT: lambda cause: (
        f"its agent did not connect within {cause.seconds:.0f} s after the last other rank"
    ),
    Kind.NOT_STARTED: _not_started,
    Kind.REFUSED: lambda cause: cause.detail or "",
    Kind.VERSIONS_DIFFER: lambda cause: (
        f"the agent on {cause.host} has {cause.detail}: install the same cpulaunch on all hosts"
    ),
    Kind.LAUNCHER_KILLED: _got,
    Kind.LAUNCHER_ENDED: lambda cause: (
        f"{cause.program} ended with code {cause.exit_code} before {cause.detail} had ended"
    ),
    Kind.CANCELLED: lambda cause: cause.detail or "",
    Kind.STALLED: lambda cause: f"no progress for {cause.seconds:.0f} s: {cause.detail}",
}
