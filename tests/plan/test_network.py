"""What the plan makes of the hosts' network cards."""

from __future__ import annotations

from cpulaunch.config.load import load
from cpulaunch.discovery.lscpu import topology_from_lscpu
from cpulaunch.model.fabrics import Fabric
from cpulaunch.model.facts import Facts, HostFacts, read_record, record
from cpulaunch.model.hosts import Host
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.plan import Plan, Program

NOTHING = "libfabric: No data available"


VERBS = Fabric("mlx5_0", "verbs", "ib0", "")


BROKEN = VERBS._replace(unusable=NOTHING)


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
