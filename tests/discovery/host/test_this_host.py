"""The CPUs of this host that a process may use."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from support.machines import HERE, MACHINES, machine

from cpulaunch.discovery.host.files import read_file
from cpulaunch.discovery.host.lscpu import topology_from_lscpu
from cpulaunch.discovery.host.sysfs import topology_from_sysfs
from cpulaunch.discovery.host.this_host import _within_limit, topology_of_process
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.facts import BF16_FLAGS

SEEN = {
    # machine: CPUs, cores of each node, sockets, first core's siblings, E-cores, memory-only nodes
    "altra-1x80": ("0-79", [80], 1, (0,), "", ""),
    "container-cpuset": ("4-9,30-32,60-65", [6, 3], 2, (4, 60), "", ""),
    "container-quota": ("0-15", [16], 1, (0,), "", ""),
    "epyc-2x32-nps4": ("0-127", [8] * 8, 2, (0, 64), "", ""),
    "gb10-10-10": ("0-19", [20], 1, (0,), "0-4,10-14", ""),
    "i9-8p-8e": ("0-23", [16], 1, (0, 1), "16-23", ""),
    "ryzen-8-two-offline": ("0-5,7-13,15", [7], 1, (0, 8), "", ""),
    "s390-lpar": ("1-5,8-10", [8], 3, (1,), "", ""),
    "sandbox-4": ("0-3", [4], 1, (0,), "", ""),
    "ultra7-6p-8e-2lp": ("0-21", [16], 1, (0, 1), "12-21", ""),
    "vm-8-adjacent": ("0-7", [4], 1, (0, 1), "", ""),
    "xeon-1x128-snc3": ("0-127", [43, 43, 42], 1, (0,), "", ""),
    "xeon-2x128": ("0-511", [128, 128], 2, (0, 256), "", ""),
    "xeon-2x128-snc3": ("0-255", [43, 43, 42] * 2, 2, (0,), "", ""),
    "xeon-2x14-by-node": ("0-55", [14, 14], 2, (0, 14), "", ""),
    "xeon-2x28": ("0-111", [28, 28], 2, (0, 56), "", ""),
    "xeon-2x8-alternating": ("0-31", [8, 8], 2, (0, 16), "", ""),
    "xeon-2x8-offline": ("0-2,4-18,20-23", [7, 8], 2, (0, 16), "", ""),
    "xeon-max-hbm": ("0-111", [14] * 8, 2, (0,), "", "8-15"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_topology_of_each_recorded_machine_is_right(name: str) -> None:
    topology = machine(name)
    per_node = [sum(core.node == node for core in topology.cores) for node in topology.nodes]
    efficient = CoreSet(cpu for core in topology.cores if core.efficient for cpu in core.cpus)
    assert SEEN[name] == (
        str(topology.allowed),
        per_node,
        len(topology.sockets),
        topology.cores[0].cpus,
        str(efficient),
        str(topology.memory_only_nodes),
    )


def test_the_allowed_cpus_are_those_in_the_process_mask() -> None:
    affinity = CoreSet(os.sched_getaffinity(0))
    assert topology_of_process(read_file, affinity).allowed == affinity


def test_sysfs_and_lscpu_of_this_machine_agree() -> None:
    try:
        text = subprocess.run(
            ["lscpu", "-p=CPU,CORE,SOCKET,NODE"], text=True, capture_output=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no lscpu here")
    by_lscpu, by_sysfs = (
        [(c.cpu, c.core, c.socket, c.node) for c in topology.cpus]
        for topology in (topology_from_lscpu(text), topology_from_sysfs(read_file))
    )
    assert by_lscpu == by_sysfs


def test_the_allowed_cpus_are_in_both_the_mask_and_the_cpuset() -> None:
    files = json.loads((HERE / "machine_files" / "container-cpuset.json").read_text())["files"]
    assert str(topology_of_process(files.get, CoreSet.parse("5-6,40")).allowed) == "5-6"


def test_the_topology_shows_the_quota_and_notes_forbidden_cpus() -> None:
    assert machine("container-quota").quota == 6.0
    assert machine("container-cpuset").quota is None
    assert machine("container-cpuset").notes == ("15 of 112 CPUs are available (CPU mask or cpuset)",)


@pytest.mark.parametrize(
    ("limit", "flags"),
    [
        ("", ("amx_bf16", "avx512_bf16")),
        ("ALL", ("amx_bf16", "avx512_bf16")),
        ("avx512_core_amx", ("amx_bf16", "avx512_bf16")),
        ("AVX512_CORE_BF16", ("avx512_bf16",)),
        ("AVX2", ()),
    ],
)
def test_flags_beyond_the_users_instruction_limit_do_not_count(limit: str, flags: tuple[str, ...]) -> None:
    assert _within_limit(BF16_FLAGS, {"ONEDNN_MAX_CPU_ISA": limit}) == flags
