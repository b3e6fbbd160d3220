"""What a program really has, read from /proc and said by its own runtime, against what was planned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cpulaunch.model.cores import CoreSet


class Planned(NamedTuple):
    """What a program should have.

    ``cores`` and ``comm_cores`` are folded lists; ``memory_policy`` is in the kernel's words, empty for its
    default; ``threads`` is the text of OMP_NUM_THREADS; ``preload`` are the libraries that the plan adds to
    LD_PRELOAD, with colons between.
    """

    cores: str
    comm_cores: str
    memory_policy: str
    threads: str
    preload: str


def at_start(pid: int, said: Mapping[str, Any], planned: Planned) -> tuple[dict[str, Any], list[str]]:
    """What the program has when its Python has started, and complaints.  ``said``: its ``cpus``."""
    cpus = CoreSet(said["cpus"])
    found = {"cpus": str(cpus), "memory_policy": memory_policy(pid), "preloaded": _preloaded(pid, planned)}
    complaints = []
    if str(cpus) != planned.cores:
        complaints.append(f"was put on CPUs {planned.cores}, but is on {cpus}")
    policy = found["memory_policy"]
    if policy is not None and planned.memory_policy and policy != planned.memory_policy:
        complaints.append(f"was given the memory policy {planned.memory_policy}, but has {policy}")
    if found["preloaded"] is not None:
        missing = [path for path in planned.preload.split(":") if path and path not in found["preloaded"]]
        if missing:
            complaints.append(f"should have preloaded {', '.join(missing)}, but has not")
    return found, complaints


def with_torch(pid: int, said: Mapping[str, Any], planned: Planned) -> tuple[dict[str, Any], list[str]]:
    """What it has once torch is imported, and complaints.

    ``said``: torch's number of ``threads``, and what the variables ``asked`` for by then.
    """
    ours = CoreSet.parse(planned.cores) | CoreSet.parse(planned.comm_cores)
    on = CoreSet(cpu for cpus in _thread_cpus(pid) for cpu in cpus)
    complaints = []
    if not on <= ours:
        complaints.append(f"was put on CPUs {ours}, but its threads are on {on}")
    # A program that sets the variable itself has its way.
    if said["asked"] == planned.threads and planned.threads.isdigit():
        expected = int(planned.threads)
        if said["threads"] not in (expected, min(expected, _physical_cores())):  # MKL goes no further
            complaints.append(f"was given {expected} threads, but torch has {said['threads']}")
    return {"cpus": str(on), "torch_threads": said["threads"]}, complaints


def memory_policy(pid: int) -> str | None:
    """The policy of a process's main thread, such as ``default`` or ``bind:0``; None where /proc is silent.

    Source: proc(5) on numa_maps, whose lines give the process's where a range of memory has no other.
    """
    try:
        with open(f"/proc/{pid}/numa_maps") as f:
            words = f.readline().split()
    except OSError:
        return None
    return words[1] if len(words) > 1 else None


def _preloaded(pid: int, planned: Planned) -> list[str] | None:
    """Those of the planned libraries that are mapped; None where the program has ended already."""
    if not planned.preload:
        return []
    try:
        with open(f"/proc/{pid}/maps") as f:
            mapped = {line.split(maxsplit=5)[5].strip() for line in f if "/" in line}
    except OSError:
        return None
    if not mapped:
        return None
    names = {os.path.basename(path) for path in mapped}
    wanted = planned.preload.split(":")
    found = [
        path for path in wanted if os.path.realpath(path) in mapped or ("/" not in path and path in names)
    ]
    # A program that ends while it is read shows a part.
    return found if found == wanted or _has_memory(pid) else None


def _has_memory(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps") as f:
            return bool(f.readline())
    except OSError:
        return False


def _physical_cores() -> int:
    cpus = os.cpu_count() or 1
    try:
        with open("/sys/devices/system/cpu/smt/active") as f:
            return cpus // 2 if f.read().strip() == "1" else cpus
    except OSError:
        return cpus


def _thread_cpus(pid: int) -> Iterator[CoreSet]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            yield CoreSet(os.sched_getaffinity(int(thread)))
        except OSError:  # it has ended
            continue
