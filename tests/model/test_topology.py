"""Topology: a host's CPUs as a value, with a JSON round trip."""

from __future__ import annotations

import json

import pytest
from support.machines import MACHINES, machine

from cpulaunch.discovery.host.lscpu import topology_from_lscpu
from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.topology import Cpu, Topology


@pytest.mark.parametrize("name", MACHINES)
def test_a_recorded_topology_round_trips(name: str) -> None:
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
def test_malformed_data_is_refused_as_a_topology(data: object) -> None:
    with pytest.raises(ConfigError, match="not a recorded topology"):
        Topology.from_json(data)  # type: ignore[arg-type]


def test_a_restricted_topology_keeps_allowed_cpus() -> None:
    topology = machine("xeon-2x28").restricted(CoreSet.parse("27-28,83,200"))
    assert [core.cpus for core in topology.cores] == [(27, 83), (28,)]
    assert (str(topology.nodes), str(topology.sockets)) == ("0-1", "0-1")


def test_a_core_as_fast_as_all_others_is_not_an_e_core() -> None:
    """If only E-cores are allowed, they count as ordinary cores."""
    assert any(core.efficient for core in machine("i9-8p-8e").cores)
    assert not any(c.efficient for c in machine("i9-8p-8e").restricted(CoreSet.parse("16-23")).cores)


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
def test_e_cores_are_clearly_slower(performances: list[float | None], efficient: list[int]) -> None:
    topology = Topology(tuple(Cpu(i, i, performance=p) for i, p in enumerate(performances)))
    assert [core.cpus[0] for core in topology.cores if core.efficient] == efficient


def test_cores_are_in_the_order_of_nodes() -> None:
    topology = topology_from_lscpu("# CPU,Core,Socket,Node\n0,0,0,1\n1,1,0,0\n2,2,0,1\n")
    assert [core.cpus for core in topology.cores] == [(1,), (0,), (2,)]


def test_the_first_cpus_belong_to_whole_cores() -> None:
    topology = topology_from_lscpu(
        "# CPU,Core,Socket,Node\n" + "".join(f"{i},{i % 4},0,0\n" for i in range(8))
    )
    assert str(topology.first(5).allowed) == "0-2,4-6"
