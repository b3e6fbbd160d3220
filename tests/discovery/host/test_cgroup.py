"""The limits that control groups set, read from files of /proc and cgroupfs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cpulaunch.discovery.host.cgroup import Throttling, cgroup_limits, cgroup_throttling, memory_limit

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
def test_cpusets_and_quotas_are_read(
    groups: str, mounts: str, files: dict[str, str], cpuset: str | None, quota: float | None
) -> None:
    found, time = cgroup_limits(reader(groups, mounts, **files))
    assert (None if found is None else str(found), time) == (cpuset, quota)


def test_without_proc_there_are_no_limits() -> None:
    assert cgroup_limits(lambda path: None) == (None, None)
    assert memory_limit(lambda path: None) is None


V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "limit"),
    [
        ("0::/a", V2_MOUNT, {}, None),
        ("0::/a", V2_MOUNT, {"a/memory.max": "max", "a/memory.high": "max"}, None),
        ("0::/a", V2_MOUNT, {"a/memory.max": "4096", "a/memory.high": "max"}, 4096),
        ("0::/a", V2_MOUNT, {"a/memory.max": "4096", "a/memory.high": "2048"}, 2048),
        ("0::/a/b", V2_MOUNT, {"a/memory.max": "1024", "a/b/memory.max": "4096"}, 1024),
        ("4:memory:/job\n0::/", V1_MEMORY, {"memory/job/memory.limit_in_bytes": "8192"}, 8192),
        ("4:memory:/job\n0::/", V1_MEMORY, {"memory/memory.limit_in_bytes": "16384"}, 16384),
        ("4:memory:/job", V1_MEMORY, {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_memory_limits_are_read(groups: str, mounts: str, files: dict[str, str], limit: int | None) -> None:
    assert memory_limit(reader(groups, mounts, **files)) == limit


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "seen"),
    [
        pytest.param("0::/a", V2_MOUNT, {"a/cpu.max": "max 100000"}, None, id="v2, no quota"),
        pytest.param(
            "0::/a/b",
            V2_MOUNT,
            {
                "a/cpu.max": "150000 100000",
                "a/cpu.stat": "usage_usec 7\nnr_periods 100\nnr_throttled 40\nthrottled_usec 2500000",
                "a/b/cpu.stat": "usage_usec 7",
            },
            Throttling(1.5, 100, 40, 2.5),
            id="v2, the parent's",
        ),
        pytest.param(
            V1_GROUPS,
            V1_MOUNTS,
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "5000",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/job/cpu.stat": "nr_periods 10\nnr_throttled 9\nthrottled_time 850000000",
            },
            Throttling(0.05, 10, 9, 0.85),
            id="v1",
        ),
    ],
)
def test_the_time_lost_to_a_quota_is_read(
    groups: str, mounts: str, files: dict[str, str], seen: Throttling | None
) -> None:
    assert cgroup_throttling(reader(groups, mounts, **files)) == seen
