"""Collect the facts of this host: topology, libraries and names."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cpulaunch.discovery.host.cgroup import cgroup_limits, memory_limit
from cpulaunch.discovery.host.files import Read, read_file
from cpulaunch.discovery.host.interfaces import interfaces_here
from cpulaunch.discovery.host.libraries import find_libraries, import_directories, library_directories
from cpulaunch.discovery.host.rate_cache import RateCache
from cpulaunch.discovery.host.sysfs import topology_from_sysfs
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.facts import BF16_FLAGS, HostFacts
from cpulaunch.model.rates import Cpu
from cpulaunch.model.topology import Topology

VERSION_FILES = {
    "torch": ("torch/version.py", "__version__"),
    "intel_extension_for_pytorch": ("intel_extension_for_pytorch/_version.py", "__version__"),
}
"""Package → the file that assigns its version, and the variable's name."""


def topology_here() -> Topology:
    """This host's topology, restricted to the CPUs and the quota of this process."""
    return topology_of_process(read_file, CoreSet(os.sched_getaffinity(0)))


def topology_of_process(read: Read, affinity: CoreSet) -> Topology:
    """The topology of the CPUs that a process may use according to its CPU mask and its cgroup.

    ``affinity`` is the mask (``os.sched_getaffinity``).  ``read`` returns files as this process sees them.
    """
    machine = topology_from_sysfs(read)
    cpuset, quota = cgroup_limits(read)
    allowed = affinity & cpuset if cpuset else affinity
    ours = machine.restricted(allowed or affinity)
    notes = machine.notes
    if len(ours.cpus) < len(machine.cpus):
        notes += (f"{len(ours.cpus)} of {len(machine.cpus)} CPUs are available (CPU mask or cpuset)",)
    return replace(ours, quota=quota, notes=notes)


def facts_here(
    libraries: Sequence[str] | None = None,
    packages: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> HostFacts:
    """Collect the facts of this host.

    ``libraries`` are directories with shared libraries, and ``packages`` are directories with Python
    packages; the default is this process's environment.  ``environ`` is the ranks' environment.
    """
    packages = import_directories() if packages is None else packages
    cpu, torch_version = cpu_here(), version_in(packages, "torch")
    return HostFacts(
        topology=topology_here(),
        names=frozenset({"localhost", "127.0.0.1", "::1", socket.gethostname()}),
        cpu_flags=_within_limit(cpu_flags(), environ),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        libraries=find_libraries(library_directories() if libraries is None else libraries, packages),
        libc=libc_here(),
        memory_limit=memory_limit(read_file),
        cpu=cpu,
        rates=RateCache.of(cpu, torch_version, environ).product_rates() if torch_version else (),
    )


def version_in(directories: Iterable[str], package: str) -> str | None:
    """The version of a package of VERSION_FILES in the first of ``directories`` that has it, or None.

    It is read from the file, because importing torch takes more than a second.
    """
    file, name = VERSION_FILES[package]
    for directory in directories:
        try:
            with open(os.path.join(directory, file), encoding="utf-8") as f:
                for line in f:
                    left, equals, right = line.partition("=")
                    if equals and left.split(":")[0].strip() == name:
                        return right.strip().strip("'\"")
        except OSError:
            continue
    return None


def libc_here() -> str:
    """The C library: for example ``glibc 2.36``, or ``musl``, or ``no glibc`` for another one."""
    try:
        if version := os.confstr("CS_GNU_LIBC_VERSION"):
            return version
    except (ValueError, OSError):  # only glibc has this name
        pass
    musl = any(name.startswith("ld-musl-") for name in os.listdir("/lib"))
    return "musl" if musl else "no glibc"


def names_here() -> frozenset[str]:
    """The names and addresses of this host, without asking a name server."""
    names = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.gethostname().partition(".")[0]}
    names |= {interface.address for interface in interfaces_here()}
    for line in (read_file("/etc/hosts") or "").splitlines():
        address, *others = line.partition("#")[0].split() or [""]
        if address in names or address.startswith("127."):  # Debian gives the host 127.0.1.1
            names.update(others)
    return frozenset(names)


def cpu_flags() -> tuple[str, ...] | None:
    """The flags of the first CPU that are in BF16_FLAGS; None if /proc/cpuinfo doesn't list flags."""
    first = _first_cpu()
    flags = first.get("flags", first.get("Features"))
    if flags is None:
        return None
    words = set(flags.split())
    # "bf16" is Arm's flag for the same feature.
    return tuple(flag for flag in BF16_FLAGS if flag in words) or (("bf16",) if "bf16" in words else ())


def _within_limit(flags: tuple[str, ...] | None, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Remove flags of instructions that ``ONEDNN_MAX_CPU_ISA`` in ``environ`` forbids."""
    limit = environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if flags is None or "AMX" in limit or limit in ("", "ALL", "DEFAULT"):
        return flags
    allowed = ("avx512_bf16",) if limit in _ISAS_WITH_AVX512_BF16 else ()
    return tuple(flag for flag in flags if flag not in BF16_FLAGS or flag in allowed)


_ISAS_WITH_AVX512_BF16 = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512")
"""Values of ``ONEDNN_MAX_CPU_ISA`` with avx512_bf16 and without AMX."""


def cpu_here() -> Cpu:
    """The model of this host's first CPU.  For Arm, ``family`` is the architecture and ``model`` the part."""
    first = _first_cpu()

    def either(x86: str, arm: str = "") -> str:
        return first.get(x86) or first.get(arm, "")

    return Cpu(
        vendor=either("vendor_id", "CPU implementer"),
        name=either("model name"),
        family=either("cpu family", "CPU architecture"),
        model=either("model", "CPU part"),
        stepping=either("stepping", "CPU revision"),
        microcode=either("microcode"),
    )


def _first_cpu() -> dict[str, str]:
    """The fields of the first CPU in /proc/cpuinfo."""
    pairs = (
        line.partition(":") for line in (read_file("/proc/cpuinfo") or "").partition("\n\n")[0].splitlines()
    )
    return {name.strip(): value.strip() for name, _, value in pairs}
