"""Compare a program's state with the plan.  The state comes from /proc and the program's reports."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from cpulaunch.agent.launch.start import RUN_PROGRAM, Planned
from cpulaunch.agent.observe import processes
from cpulaunch.discovery.host.files import read_file
from cpulaunch.messages import Found, Ready, Torch
from cpulaunch.model.cores import CoreSet


def at_start(pid: int, report: Ready, planned: Planned) -> tuple[Found, list[str]]:
    """Check CPUs, memory policy and preloaded libraries after Python has started.

    Returns the values found, and a complaint for each difference from the plan.
    """
    cpus = CoreSet(report.cpus)
    policy, preloaded = memory_policy(pid), _preloaded(pid, planned.preloads)
    complaints = []
    if cpus != planned.cores:
        complaints.append(f"was put on CPUs {planned.cores}, but is on {cpus}")
    if policy is not None and planned.memory_policy and policy != planned.memory_policy:
        complaints.append(f"was given the memory policy {planned.memory_policy}, but has {policy}")
    missing = [] if preloaded is None else [path for path in planned.preloads if path not in preloaded]
    if missing:
        complaints.append(f"should have preloaded {', '.join(missing)}, but has not")
    return Found(str(cpus), policy, preloaded, None), complaints


def with_torch(pid: int, report: Torch, planned: Planned) -> tuple[Found, list[str]]:
    """Check the CPUs of all threads, and torch's number of threads, after the import of torch.

    Returns the values found, and a complaint for each difference from the plan.
    """
    planned_cpus = planned.cores | planned.comm_cores
    actual_cpus = CoreSet(cpu for cpus in _thread_cpus(pid) for cpu in cpus)
    complaints = []
    if not actual_cpus <= planned_cpus:
        complaints.append(f"was put on CPUs {planned_cpus}, but its threads are on {actual_cpus}")
    # Skip the check if the program has set the variable itself.
    if report.requested == planned.threads and planned.threads.isdigit():
        expected = int(planned.threads)
        if report.threads != expected and report.threads != min(expected, _physical_cores()):  # MKL's limit
            complaints.append(f"was given {expected} threads, but torch has {report.threads}")
    return Found(str(actual_cpus), None, None, report.threads), complaints


def memory_policy(pid: int) -> str | None:
    """The memory policy of a process's main thread, such as ``default`` or ``bind:0``; None if unknown.

    Source: numa_maps in proc(5).  Each line shows the policy of a memory range, by default the process's.
    """
    try:
        with open(f"/proc/{pid}/numa_maps") as f:
            words = f.readline().split()
    except OSError:
        return None
    return words[1] if len(words) > 1 else None


def _preloaded(pid: int, wanted: list[str]) -> list[str] | None:
    """The libraries in ``wanted`` that the program has mapped; None if it has ended or called exec."""
    if not wanted:
        return []
    if (maps := read_file(f"/proc/{pid}/maps")) is None:
        return None
    mapped = {line.split(maxsplit=5)[5].strip() for line in maps.split("\n") if "/" in line}
    names = {os.path.basename(path) for path in mapped}
    found = [
        path for path in wanted if os.path.realpath(path) in mapped or ("/" not in path and path in names)
    ]
    # While the program ends or calls exec, the list of mappings is incomplete.
    return found if found == wanted or _is_our_program(pid) else None


def _is_our_program(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return os.fsencode(RUN_PROGRAM) in f.read().split(b"\0")
    except OSError:
        return False


def _physical_cores() -> int:
    """The number of this machine's physical cores."""
    from cpulaunch.discovery.host.sysfs import topology_from_sysfs

    return len(topology_from_sysfs(read_file).cores)


def _thread_cpus(pid: int) -> Iterator[CoreSet]:
    for thread in processes.threads(pid):
        with contextlib.suppress(OSError):  # the thread has ended, or a filter forbids the call
            yield CoreSet(os.sched_getaffinity(thread))
