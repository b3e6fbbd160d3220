"""Compare the state of a program, from /proc and from its own reports, with the plan."""

from __future__ import annotations

import os
from collections.abc import Iterator

from cpulaunch.agent.launch.start import RUN_PROGRAM, Planned
from cpulaunch.discovery.host.files import read_file
from cpulaunch.messages import Found, Ready, Torch
from cpulaunch.model.cores import CoreSet


def at_start(pid: int, report: Ready, planned: Planned) -> tuple[Found, list[str]]:
    """Check CPUs, memory policy and preloaded libraries once Python has started.

    Returns the values found, and a complaint for each that differs from the plan.
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
    """Check the CPUs of all threads and torch's number of threads once torch is imported.

    Returns the values found, and a complaint for each that differs from the plan.
    """
    ours = planned.cores | planned.comm_cores
    on = CoreSet(cpu for cpus in _thread_cpus(pid) for cpu in cpus)
    complaints = []
    if not on <= ours:
        complaints.append(f"was put on CPUs {ours}, but its threads are on {on}")
    # The program may set the variable itself; then there is nothing to compare.
    if report.requested == planned.threads and planned.threads.isdigit():
        expected = int(planned.threads)
        if report.threads != expected and report.threads != min(expected, _physical_cores()):  # MKL's limit
            complaints.append(f"was given {expected} threads, but torch has {report.threads}")
    return Found(str(on), None, None, report.threads), complaints


def memory_policy(pid: int) -> str | None:
    """The memory policy of a process's main thread, such as ``default`` or ``bind:0``; None if unknown.

    Source: proc(5) on numa_maps.  A line shows the process's policy if its range of memory has no other.
    """
    try:
        with open(f"/proc/{pid}/numa_maps") as f:
            words = f.readline().split()
    except OSError:
        return None
    return words[1] if len(words) > 1 else None


def _preloaded(pid: int, wanted: list[str]) -> list[str] | None:
    """The libraries in ``wanted`` that the program has mapped.

    None if the program has ended or executes another file.
    """
    if not wanted:
        return []
    if (maps := read_file(f"/proc/{pid}/maps")) is None:
        return None
    mapped = {line.split(maxsplit=5)[5].strip() for line in maps.split("\n") if "/" in line}
    names = {os.path.basename(path) for path in mapped}
    found = [
        path for path in wanted if os.path.realpath(path) in mapped or ("/" not in path and path in names)
    ]
    # The list may be incomplete if the program is just ending, or empty if it has just called exec.
    return found if found == wanted or _is_our_program(pid) else None


def _is_our_program(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return os.fsencode(RUN_PROGRAM) in f.read().split(b"\0")
    except OSError:
        return False


def _physical_cores() -> int:
    """The physical cores of this machine, also where some have one thread and some have several."""
    from cpulaunch.discovery.host.sysfs import topology_from_sysfs

    return len(topology_from_sysfs(read_file).cores)


def _thread_cpus(pid: int) -> Iterator[CoreSet]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            yield CoreSet(os.sched_getaffinity(int(thread)))
        except OSError:  # the thread has ended
            continue
