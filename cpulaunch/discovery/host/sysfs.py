"""Read the topology of the CPUs from sysfs."""

from __future__ import annotations

from cpulaunch.discovery.host.files import Read
from cpulaunch.errors import HostError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.topology import Cpu, Topology, renumbered

CPU = "/sys/devices/system/cpu/"
NODE = "/sys/devices/system/node/"


def topology_from_sysfs(read: Read) -> Topology:
    """The topology of all online CPUs, from ``/sys/devices/system``.

    Raises `HostError` if it can't be read.  Sources: Documentation/admin-guide/cputopology.rst and
    Documentation/ABI/testing/sysfs-devices-system-cpu of Linux.
    """
    online = _first_set(read, CPU + "online", CPU + "possible")
    if not online:
        raise HostError(f"{CPU}online can't be read, so the CPUs are unknown")
    notes: list[str] = []
    nodes, memory_only = _nodes(read, online)
    sockets = _sockets(read, online)
    performances = _performances(read, online, len(set(sockets.values())))
    cpus = []
    for number, siblings in enumerate(_cores(read, online, notes)):
        for cpu in siblings:
            cpus.append(Cpu(cpu, number, sockets[cpu], nodes.get(cpu, 0), performances.get(cpu)))
    return Topology(renumbered(cpus), memory_only, notes=tuple(notes))


def _nodes(read: Read, online: CoreSet) -> tuple[dict[int, int], CoreSet]:
    """The NUMA node of each CPU, and the nodes without CPUs.  Both are empty on a kernel without NUMA."""
    nodes: dict[int, int] = {}
    memory_only = []
    for node in _first_set(read, NODE + "online", NODE + "possible"):
        listed = read(f"{NODE}node{node}/cpulist")
        if listed is None:
            continue
        cpus = CoreSet.parse(listed)
        if not cpus:
            memory_only.append(node)
        for cpu in cpus & online:
            nodes[cpu] = node
    return nodes, CoreSet(memory_only)


def _sockets(read: Read, online: CoreSet) -> dict[int, int]:
    """The socket of each CPU, numbered from 0."""
    sockets: dict[int, int] = {}
    found = 0
    for cpu in online:
        if cpu not in sockets:
            topology = f"{CPU}cpu{cpu}/topology/"
            package = _first_set(read, topology + "package_cpus_list", topology + "core_siblings_list")
            for other in package & online if package else online:
                sockets.setdefault(other, found)
            sockets[cpu] = found
            found += 1
    return sockets


def _cores(read: Read, online: CoreSet, notes: list[str]) -> list[CoreSet]:
    """The CPUs of each physical core, ordered by their first CPU."""
    cores: list[CoreSet] = []
    seen: set[int] = set()
    unknown = 0
    for cpu in online:
        if cpu not in seen:
            topology = f"{CPU}cpu{cpu}/topology/"
            listed = _first_set(read, topology + "thread_siblings_list", topology + "core_cpus_list")
            siblings = listed & online
            unknown += not siblings
            cores.append(siblings | CoreSet([cpu]))
            seen.update(cores[-1])
    if unknown:
        notes.append(f"sysfs doesn't name the cores of {unknown} CPUs: each is assumed to be a core")
    return cores


def _performances(read: Read, online: CoreSet, sockets: int) -> dict[int, float]:
    """A number for each CPU, which is higher for P-cores than for E-cores; empty if all cores are equal.

    The sources are the lists of Intel's P- and E-cores, ``cpu_capacity`` of Arm (and x86 since Linux 6.12),
    and the maximum frequency.  The latter two take a read per CPU.  They are skipped on machines with several
    sockets, as no such machine is hybrid.
    """
    efficient = _first_set(read, "/sys/devices/cpu_atom/cpus")
    fast = _first_set(read, "/sys/devices/cpu_core/cpus")
    if efficient and fast:
        # Low-power E-cores may be in neither list.
        return {cpu: 1024.0 if cpu in fast else 512.0 for cpu in online}
    if sockets > 1:
        return {}
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        figures = {}
        for cpu in online:
            text = read(f"{CPU}cpu{cpu}/{name}")
            if text is None or not text.strip().isdigit():
                break
            figures[cpu] = float(text)
        if len(set(figures.values())) > 1:
            return figures
    return {}


def _first_set(read: Read, *paths: str) -> CoreSet:
    """The CPU list in the first of these files that exists; empty if none does."""
    for path in paths:
        text = read(path)
        if text is not None:
            return CoreSet.parse(text)
    return CoreSet()
