"""Fast network cards: found in recorded trees of sysfs, tried with the real libfabric, chosen by the plan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cpulaunch.config.load import load
from cpulaunch.discovery.fabrics import find_fabrics, why_unusable
from cpulaunch.discovery.lscpu import topology_from_lscpu
from cpulaunch.model.fabrics import Fabric, common_provider
from cpulaunch.model.facts import Facts, HostFacts, read_record, record
from cpulaunch.model.hosts import Host
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.plan import Plan, Program

LIBRARIES = [str(Path(sys.prefix, "lib"))]
NOTHING = "libfabric: No data available"

VERBS = Fabric("mlx5_0", "verbs", "ib0", "")
BROKEN = VERBS._replace(unusable=NOTHING)
PSM3 = Fabric("irdma0", "psm3", "ens1", "")


@pytest.fixture
def card(tmp_path: Path) -> Callable[..., str]:
    """Adds a card to a tree; returns the tree's path."""

    def add(name: str, driver: str, state: str = "4: ACTIVE", interface: str = "") -> str:
        device = tmp_path / "cards" / name
        (device / "ports" / "1").mkdir(parents=True)
        (device / "ports" / "1" / "state").write_text(state + "\n")
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "device").mkdir()
        (device / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
        if interface:
            (device / "device" / "net" / interface).mkdir(parents=True)
        return str(device.parent)

    return add


@pytest.mark.parametrize(
    ("driver", "interface", "provider"),
    [
        ("mlx5_core", "ib0", "verbs"),
        ("bnxt_re", "ens3", "verbs"),
        ("irdma", "ens1", "psm3"),
        ("hfi1", "ib0", "psm2"),
        ("efa", "", "efa"),
    ],
)
def test_a_card_has_the_provider_of_its_driver(card, driver: str, interface: str, provider: str) -> None:
    """The real libfabric then finds no such hardware here."""
    cards = card("card0", driver, interface=interface)
    assert find_fabrics(LIBRARIES, cards) == (Fabric("card0", provider, interface, NOTHING),)


def test_a_card_without_a_link_and_a_host_without_cards(card) -> None:
    assert find_fabrics(LIBRARIES, card("mlx5_0", "mlx5_core", state="1: DOWN")) == ()
    assert find_fabrics(LIBRARIES, "/nowhere") == ()


def test_libfabric_says_what_works() -> None:
    assert why_unusable("tcp", LIBRARIES) == ""
    assert why_unusable("verbs", LIBRARIES, "ib0") == NOTHING
    assert why_unusable("tcp", ["/nowhere"]) == "there is no libfabric"


def test_a_libfabric_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "libfabric.so.1").write_text("no library")
    assert "libfabric.so.1" in why_unusable("tcp", [str(tmp_path)])


@pytest.mark.parametrize(
    ("hosts", "provider", "complaints"),
    [
        ({"a": (VERBS,), "b": (VERBS,)}, "verbs", {}),
        ({"a": (PSM3, VERBS), "b": (VERBS,)}, "verbs", {}),
        ({"a": (), "b": ()}, None, {}),
        ({}, None, {}),
        ({"a": (VERBS,), "b": ()}, None, {"a": "b has none that works"}),
        ({"a": (VERBS,), "b": None}, None, {"a": "b has none that works"}),
        ({"a": (VERBS,), "b": (PSM3,)}, None, {"a": "other hosts have other kinds", "b": "other hosts have other kinds"}),
        ({"a": (BROKEN,), "b": (BROKEN,)}, None, {"a": NOTHING, "b": NOTHING}),
    ],
)  # fmt: skip
def test_all_hosts_must_have_it(hosts, provider: str | None, complaints: dict[str, str]) -> None:
    chosen, said = common_provider(hosts)
    assert (chosen, sorted(said)) == (provider, sorted(complaints))
    for host, why in complaints.items():
        card = hosts[host][0]
        assert said[host] == f"its {card.device} ({card.provider}) stays unused, TCP is taken: {why}"


# ---- what the plan makes of them


def plan(*cards: tuple[Fabric, ...] | None, said: tuple[tuple[str, str, str], ...] = ()) -> Plan:
    topology = topology_from_lscpu("# CPU,Core,Socket,Node\n0,0,0,0\n1,1,0,0\n")
    hosts = {
        f"node{number}": HostFacts(topology, interface=f"eth{number}", fabrics=found)
        for number, found in enumerate(cards)
    }
    facts = Facts(like=hosts["node0"], listed=tuple(map(Host, hosts)), hosts=hosts)
    assert read_record(record(hosts), "f") == hosts
    return make_plan(load(said, environ={}), facts, Program(("python", "train.py"), True, "/", "python"))


def variables(plan: Plan) -> list[dict[str, str]]:
    return [{k: v for k, v in {**plan.env, **host.env}.items() if k.startswith("FI_")} for host in plan.hosts]


def test_a_card_that_works_everywhere_is_used_by_its_own_interface() -> None:
    made = plan((VERBS,), (VERBS._replace(interface="ib7"),))
    assert variables(made) == [
        {"FI_PROVIDER": "verbs", "FI_VERBS_IFACE": "ib0"},
        {"FI_PROVIDER": "verbs", "FI_VERBS_IFACE": "ib7"},
    ]
    assert {"key": "ccl.provider", "value": "verbs", "origin": "detected"} in made.settings
    assert not made.notes


def test_else_tcp_is_and_the_plan_says_why() -> None:
    made = plan((VERBS,), (BROKEN,))
    assert [each["FI_PROVIDER"] for each in variables(made)] == ["tcp", "tcp"]
    assert made.notes == (
        "node0: its mlx5_0 (verbs) stays unused, TCP is taken: node1 has none that works",
        f"node1: its mlx5_0 (verbs) stays unused, TCP is taken: {NOTHING}",
    )


def test_what_the_user_says_is_not_asked_about() -> None:
    made = plan((VERBS,), (BROKEN,), said=(("ccl.provider", "verbs", "--provider"),))
    assert [each["FI_PROVIDER"] for each in variables(made)] == ["verbs", "verbs"]
    assert not made.notes


def test_gloo_leaves_cards_unused() -> None:
    made = plan((VERBS,), (VERBS,), said=(("training.backend", "gloo", "--backend"),))
    assert made.notes == ("gloo uses TCP only: the hosts' cards for verbs stay unused",)


def test_one_host_needs_no_card() -> None:
    made = plan((VERBS,))
    assert variables(made)[0]["FI_PROVIDER"] == "tcp"
    assert not made.notes
