"""Making a topology from sysfs."""

from __future__ import annotations

import json

import pytest
from support.machines import HERE

from cpulaunch.discovery.host.sysfs import topology_from_sysfs
from cpulaunch.errors import HostError


def test_without_sysfs_there_is_an_error() -> None:
    with pytest.raises(HostError, match="/sys/devices/system/cpu/online can't be read"):
        topology_from_sysfs(lambda path: None)


def test_offline_siblings_are_left_out() -> None:
    cpu = "/sys/devices/system/cpu/"
    files = {cpu + "online": "0", cpu + "cpu0/topology/thread_siblings_list": "0-1"}
    assert [core.cpus for core in topology_from_sysfs(files.get).cores] == [(0,)]


@pytest.mark.parametrize(
    ("name", "most"), [("xeon-2x28", 70), ("xeon-max-hbm", 140), ("altra-1x80", 170), ("i9-8p-8e", 30)]
)
def test_sysfs_is_read_with_few_reads(name: str, most: int) -> None:
    """The agents of all ranks read sysfs, possibly at the same time."""
    files: dict[str, str] = json.loads((HERE / "machine_files" / f"{name}.json").read_text())["files"]
    reads: list[str] = []

    def read(path: str) -> str | None:
        reads.append(path)
        return files.get(path)

    topology_from_sysfs(read)
    assert len(reads) <= most
    assert len(reads) == len(set(reads))
