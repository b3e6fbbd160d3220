"""Topology: what sysfs, lscpu and control groups say about a host's CPUs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable

import pytest
from support.machines import HERE, MACHINES, machine

from cpulaunch.discovery.cgroup import cgroup_limits
from cpulaunch.discovery.lscpu import topology_from_lscpu
from cpulaunch.discovery.sysfs import topology_from_sysfs
from cpulaunch.discovery.this_host import topology_of_process
from cpulaunch.errors import ConfigError, HostError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.topology import Cpu, Topology

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
def test_each_machine_is_seen_as_it_is(name: str) -> None:
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
    assert topology.is_hybrid == bool(efficient)


@pytest.mark.parametrize("name", MACHINES)
def test_a_recorded_topology_is_read_back_as_it_was(name: str) -> None:
    topology = machine(name)
    recorded = json.dumps(topology.to_json())
    again = Topology.from_json(json.loads(recorded))
    assert again == topology
    assert json.dumps(again.to_json()) == recorded


def test_the_recorded_form_is_a_row_per_cpu() -> None:
    topology = Topology(
        (Cpu(0, 0), Cpu(5, 1, 1, 2, 4800.0)), memory_only_nodes=CoreSet([3]), quota=1.5, notes=("a note",)
    )
    assert topology.to_json() == {
        "cpus": [[0, 0, 0, 0], [5, 1, 1, 2, 4800.0]],
        "memory_only_nodes": "3",
        "quota": 1.5,
        "notes": ["a note"],
    }


@pytest.mark.parametrize("data", [{}, {"cpus": 3}, {"cpus": [[0, 0]]}, {"cpus": [["0", 0, 0, 0]]}, [], None])
def test_something_else_than_a_recorded_topology_is_an_error(data: object) -> None:
    with pytest.raises(ConfigError, match="not a recorded topology"):
        Topology.from_json(data)  # type: ignore[arg-type]


def test_a_restricted_topology_keeps_what_is_allowed() -> None:
    topology = machine("xeon-2x28").restricted(CoreSet.parse("27-28,83,200"))
    assert [core.cpus for core in topology.cores] == [(27, 83), (28,)]
    assert (str(topology.nodes), str(topology.sockets)) == ("0-1", "0-1")


def test_a_core_that_is_not_slower_than_its_machine_is_no_e_core() -> None:
    """Only E-cores allowed: to this process they are simply the cores."""
    assert machine("i9-8p-8e").is_hybrid
    assert not machine("i9-8p-8e").restricted(CoreSet.parse("16-23")).is_hybrid


@pytest.mark.parametrize(
    ("performances", "efficient"),
    [
        ([5200, 5200, 4600, 4600], [2, 3]),  # Core Ultra 5 245K
        ([4800, 4500, 3800, 2500], [2, 3]),  # Core Ultra 7 155H: favoured, P, E and low-power E
        ([5083, 5058, 4958, 4733], []),  # rankings of AMD
        ([4800, 4800, 4600, 4600], []),  # Turbo Boost Max
        ([1024, 1017, 718, 718], [2, 3]),
        ([None, None, 3800, 3800], []),
        ([None, 4800, 3800, 3800], [2, 3]),
        ([0, 0, 0, 0], []),
    ],
)
def test_e_cores_are_those_that_are_clearly_slower(
    performances: list[float | None], efficient: list[int]
) -> None:
    topology = Topology(tuple(Cpu(i, i, performance=p) for i, p in enumerate(performances)))
    assert [core.cpus[0] for core in topology.cores if core.efficient] == efficient


# --- lscpu ---

ONE_CPU = ((0, 0, 0, 0),)
TWO_CORES = ((0, 0, 0, 0), (1, 1, 0, 0))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        pytest.param("# CPU,Core,Socket,Node\n0,0,0,0\n1,1,0,0\n", TWO_CORES, id="-p"),
        pytest.param("0,0,0,0\n1,1,0,0\n", TWO_CORES, id="-p without comments"),
        pytest.param("# NODE,SOCKET,CPU,CORE\n0,0,0,0\n0,0,1,1\n", TWO_CORES, id="-p in another order"),
        pytest.param(
            "# CPU,Core,Socket,Node,,L1d,L2\n0,0,0,0,,0,0\n1,1,0,0,,8\n", TWO_CORES, id="-p with caches"
        ),
        pytest.param("# CPU,Core,Socket,Node\n0,0,0,\n1,1,-,-\n", TWO_CORES, id="-p with unknown cells"),
        pytest.param(
            "# CPU,Core,Socket,Node\n4,3,7,0\n9,5,7,0\n", ((4, 0, 0, 0), (9, 1, 0, 0)), id="odd numbers"
        ),
        pytest.param("# CPU,Core\n0,0\n1,0\n", ((0, 0, 0, 0), (1, 0, 0, 0)), id="-p=CPU,CORE"),
        pytest.param("# CPU,Core,Socket,Node,Online\n0,0,0,0,Y\n1,1,0,0,N\n", ONE_CPU, id="-p -a"),
        pytest.param("# CPU,Core,Socket,Node\n0,0,0,0\n1,,,\n", ONE_CPU, id="-p -a without ONLINE"),
        pytest.param("CPU NODE SOCKET CORE ONLINE\n0 0 0 0 yes\n1 - - - no\n", ONE_CPU, id="-e -a"),
        pytest.param("CPU CORE L1d:L1i:L2:L3\n  0    0 0:0:0:0\n  1    1 1:1:1:0\n", TWO_CORES, id="-e"),
        pytest.param(
            "CPU SOCKET CORE\n1 1 0\n0 0 0\n", ((0, 0, 0, 0), (1, 1, 1, 0)), id="cores counted by socket"
        ),
        pytest.param("CPU CORE\n0 -\n1 -\n", TWO_CORES, id="cores unknown"),
    ],
)
def test_the_tables_of_lscpu_are_read(text: str, cpus: tuple[tuple[int, int, int, int], ...]) -> None:
    topology = topology_from_lscpu(text)
    assert tuple((c.cpu, c.core, c.socket, c.node) for c in topology.cpus) == cpus


@pytest.mark.parametrize(
    ("text", "performance"),
    [
        ("# CPU,Core,Socket,Node,Maxmhz\n0,0,0,0,4800.0000\n", 4800.0),
        ("# CPU,Core,Socket,Node,Maxmhz\n0,0,0,0,\n", None),
        ("# CPU,Core,Socket,Node,,L1d,L1i,L2,L3,Maxmhz\n0,0,0,0,,64,64,8,2500.0000\n", 2500.0),
        ("CPU CORE MAXMHZ\n0 0 5100,0000\n", 5100.0),
    ],
)
def test_the_maximum_frequency_is_read(text: str, performance: float | None) -> None:
    assert topology_from_lscpu(text).cpus[0].performance == performance


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no CPUs in the lscpu text"),
        ("# CPU,Core,Socket,Node\n", "no CPUs in the lscpu text"),
        (
            "Architecture: x86_64\nCPU(s): 2\n",
            "line 1 of the lscpu text is no heading with the columns CPU and CORE",
        ),
        ("CPU op-mode(s): 32-bit, 64-bit\n", "line 1 of the lscpu text is no heading"),
        ("# CPU,Socket\n0,0\n", "has no CORE column, but CPU, SOCKET"),
        ("# CPU,Core,Socket,Node\n0,0,0,0\n1,1,0\n", "line 3 of the lscpu text has 3 values for 4 columns"),
        ("CPU CORE\n0 0\n1\n", "line 3 of the lscpu text has 1 value for 2 columns"),
        ("# CPU,Core,Socket,Node\n0,0,0,0\n0,1,0,0\n", "line 3 of the lscpu text describes CPU 0 once more"),
        (
            "# CPU,Core,Socket,Node\n0,zero,0,0\n",
            "line 2 of the lscpu text has 'zero' where a CORE number belongs",
        ),
        ("# CPU,Core,Socket,Node\n,0,0,0\n", "line 2 of the lscpu text has no CPU number"),
        ("CPU CORE MAXMHZ\n0 0 fast\n", "line 2 of the lscpu text has 'fast' where MAXMHZ belongs"),
    ],
)
def test_what_is_no_table_of_lscpu_is_an_error_that_names_the_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        topology_from_lscpu(text)
    assert message in str(caught.value)
    assert caught.value.hint == "Record the machine with: lscpu -p=CPU,CORE,SOCKET,NODE,MAXMHZ"


def test_missing_columns_are_noted() -> None:
    assert topology_from_lscpu("CPU CORE\n0 0\n").notes == (
        "lscpu's text has no SOCKET column: taken as one socket",
        "lscpu's text has no NODE column: taken as one NUMA node",
    )


# --- sysfs ---


def test_without_sysfs_the_host_is_not_ready() -> None:
    with pytest.raises(HostError, match="/sys/devices/system/cpu/online can't be read"):
        topology_from_sysfs(lambda path: None)


def test_offline_siblings_are_left_out() -> None:
    cpu = "/sys/devices/system/cpu/"
    files = {cpu + "online": "0", cpu + "cpu0/topology/thread_siblings_list": "0-1"}
    assert [core.cpus for core in topology_from_sysfs(files.get).cores] == [(0,)]


def test_cores_come_in_the_order_of_nodes() -> None:
    topology = topology_from_lscpu("# CPU,Core,Socket,Node\n0,0,0,1\n1,1,0,0\n2,2,0,1\n")
    assert [core.cpus for core in topology.cores] == [(1,), (0,), (2,)]


@pytest.mark.parametrize(
    ("name", "most"), [("xeon-2x28", 70), ("xeon-max-hbm", 140), ("altra-1x80", 170), ("i9-8p-8e", 30)]
)
def test_reading_sysfs_takes_few_reads(name: str, most: int) -> None:
    """The agent of each rank reads it."""
    files: dict[str, str] = json.loads((HERE / "machine_files" / f"{name}.json").read_text())["files"]
    reads: list[str] = []

    def read(path: str) -> str | None:
        reads.append(path)
        return files.get(path)

    topology_from_sysfs(read)
    assert len(reads) <= most
    assert len(reads) == len(set(reads))


def read_file(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def test_sysfs_and_lscpu_of_this_machine_agree() -> None:
    try:
        text = subprocess.run(
            ["lscpu", "-p=CPU,CORE,SOCKET,NODE"], text=True, capture_output=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no lscpu here")
    rows = [[(c.cpu, c.core, c.socket, c.node) for c in t.cpus] for t in (
        topology_from_lscpu(text), topology_from_sysfs(read_file))]  # fmt: skip
    assert rows[0] == rows[1]


def test_this_process_has_the_cpus_of_its_mask() -> None:
    affinity = CoreSet(os.sched_getaffinity(0))
    assert topology_of_process(read_file, affinity).allowed == affinity


# --- control groups ---

V2_MOUNT = "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
)
V1_GROUPS = "9:cpuset:/job\n4:cpu,cpuacct:/job\n0::/job"


def reader(groups: str, mounts: str, **files: str) -> Callable[[str], str | None]:
    tree = {"/proc/self/cgroup": groups, "/proc/self/mountinfo": mounts}
    tree |= {"/sys/fs/cgroup/" + path: text + "\n" for path, text in files.items()}
    return tree.get


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "cpuset", "quota"),
    [
        pytest.param("0::/", V2_MOUNT, {}, None, None, id="v2, no limits"),
        pytest.param("0::/a/b", V2_MOUNT, {"a/b/cpuset.cpus.effective": "2-5"}, "2-5", None, id="v2, cpuset"),
        pytest.param("0::/a/b", V2_MOUNT, {"a/cpuset.cpus.effective": "1"}, "1", None, id="v2, the parent's"),
        pytest.param("0::/a", V2_MOUNT, {"a/cpu.max": "150000 100000"}, None, 1.5, id="v2, quota"),
        pytest.param("0::/a", V2_MOUNT, {"a/cpu.max": "max 100000"}, None, None, id="v2, no quota"),
        pytest.param(
            "0::/a/b", V2_MOUNT, {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, None, 4.0,
            id="v2, the parent's quota",
        ),
        pytest.param(
            "0::/a/b", V2_MOUNT, {"a/b/cpu.max": "200000 100000", "a/cpu.max": "400000 100000"}, None, 2.0,
            id="v2, its own is the smallest quota",
        ),
        pytest.param(
            "0::/a/b", V2_MOUNT, {"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, None, 2.0,
            id="v2, the parent's is the smallest quota",
        ),
        pytest.param(
            "0::/../..", V2_MOUNT, {"cpu.max": "300000 100000"}, None, 3.0, id="v2, outside of the namespace"
        ),
        pytest.param(
            V1_GROUPS, V1_MOUNTS,
            {"cpuset/job/cpuset.effective_cpus": "1-3", "cpu,cpuacct/job/cpu.cfs_quota_us": "250000",
             "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, "1-3", 2.5, id="v1",
        ),
        pytest.param(
            V1_GROUPS, V1_MOUNTS,
            {"cpuset/job/cpuset.cpus": "4", "cpu,cpuacct/job/cpu.cfs_quota_us": "-1",
             "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, "4", None, id="v1, old kernel, no quota",
        ),
        pytest.param(
            "0::/docker/4f2", "40 31 0:36 /docker/4f2 /sys/fs/cgroup ro - cgroup2 cgroup ro",
            {"cpuset.cpus.effective": "0-1", "cpu.max": "50000 100000"}, "0-1", 0.5, id="v2, in a container",
        ),
        pytest.param(
            "0::/docker/4f2/in/it", "40 31 0:36 /docker/4f2 /sys/fs/cgroup ro - cgroup2 cgroup ro",
            {"in/cpu.max": "70000 100000"}, None, 0.7, id="v2, a group within a container",
        ),
        pytest.param("0::/docker/4f2", "", {}, None, None, id="nothing mounted"),
    ],
)  # fmt: skip
def test_cpusets_and_quotas_of_control_groups(
    groups: str, mounts: str, files: dict[str, str], cpuset: str | None, quota: float | None
) -> None:
    found, time = cgroup_limits(reader(groups, mounts, **files))
    assert (None if found is None else str(found), time) == (cpuset, quota)


def test_no_proc_no_limits() -> None:
    assert cgroup_limits(lambda path: None) == (None, None)


def test_a_mask_within_a_cpuset_is_what_counts() -> None:
    files = json.loads((HERE / "machine_files" / "container-cpuset.json").read_text())["files"]
    assert str(topology_of_process(files.get, CoreSet.parse("5-6,40")).allowed) == "5-6"


def test_a_process_has_its_quota_and_says_what_it_may_not_use() -> None:
    assert machine("container-quota").quota == 6.0
    assert machine("container-cpuset").quota is None
    assert machine("container-cpuset").notes == ("15 of 112 CPUs may be used (CPU mask or cpuset)",)
