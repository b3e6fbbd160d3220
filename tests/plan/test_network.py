"""The network part of a plan: the hosts' cards, their interfaces, the master's address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.plans import BROKEN, NO_DATA, SMALL, VERBS, make, setting

from cpulaunch.errors import CpulaunchError, PlanError
from cpulaunch.launchers import load
from cpulaunch.launchers.command import Installation
from cpulaunch.model.fabrics import Fabric
from cpulaunch.model.facts import HostFacts, Mpi, read_record, record
from cpulaunch.plan.plan import Plan


def with_cards(*cards: tuple[Fabric, ...], settings: tuple[str, ...] = ()) -> Plan:
    """Return the plan for hosts that have these cards."""
    hosts = {
        f"node{number}": replace(SMALL, cpu_flags=("amx_bf16",), interface=f"eth{number}", fabrics=found)
        for number, found in enumerate(cards)
    }
    assert read_record(record(hosts), "f") == hosts
    return make(*settings, hosts=",".join(hosts), facts=hosts["node0"], hosts_known=hosts)


def host(interface: str, address: str) -> HostFacts:
    return replace(SMALL, interface=interface, address=address)


KNOWN = {"a": host("eth0", "10.0.0.1"), "b": host("ens5", "10.0.0.2")}


def looked_at(
    *settings: str,
    hosts: str = "a,b",
    known: Mapping[str, HostFacts] = KNOWN,
    environ: dict[str, str] | None = None,
) -> Plan:
    """Return the plan for hosts, some of which were inspected."""
    return make(*settings, hosts=hosts, facts=SMALL, hosts_known=known, environ=environ)


def variables(plan: Plan) -> list[dict[str, str]]:
    return [{k: v for k, v in {**plan.env, **host.env}.items() if k.startswith("FI_")} for host in plan.hosts]


def test_a_card_that_works_everywhere_is_used_with_its_own_interface() -> None:
    made = with_cards((VERBS,), (VERBS._replace(interface="ib7"),))
    assert variables(made) == [
        {"FI_PROVIDER": "verbs", "FI_VERBS_IFACE": "ib0"},
        {"FI_PROVIDER": "verbs", "FI_VERBS_IFACE": "ib7"},
    ]
    assert setting(made, "ccl.provider") == ("verbs", "detected")
    assert not made.notes


def test_otherwise_tcp_is_used_and_the_plan_notes_why() -> None:
    made = with_cards((VERBS,), (BROKEN,))
    assert [each["FI_PROVIDER"] for each in variables(made)] == ["tcp", "tcp"]
    assert made.notes == (
        "node0: its mlx5_0 (verbs) stays unused, TCP is taken: node1 has none that works",
        f"node1: its mlx5_0 (verbs) stays unused, TCP is taken: {NO_DATA}",
    )


def test_a_provider_of_the_user_is_not_checked() -> None:
    made = with_cards((VERBS,), (BROKEN,), settings=("ccl.provider=verbs",))
    assert [each["FI_PROVIDER"] for each in variables(made)] == ["verbs", "verbs"]
    assert not made.notes


def test_gloo_leaves_cards_unused() -> None:
    made = with_cards((VERBS,), (VERBS,), settings=("training.backend=gloo",))
    assert made.notes == ("gloo uses TCP only: the hosts' cards for verbs stay unused",)


def test_one_host_needs_no_card() -> None:
    made = with_cards((VERBS,))
    assert variables(made)[0]["FI_PROVIDER"] == "tcp"
    assert not made.notes


def test_each_host_gets_its_own_interface() -> None:
    made = looked_at("training.backend=ccl")
    names = ("GLOO_SOCKET_IFNAME", "CCL_KVS_IFACE", "FI_TCP_IFACE")
    assert [[host.env[name] for name in names] for host in made.hosts] == [["eth0"] * 3, ["ens5"] * 3]
    assert not set(names) & set(made.env)


def test_a_common_interface_is_named_once() -> None:
    made = looked_at(known={name: host("eth0", f"10.0.0.{n}") for n, name in enumerate("ab")})
    assert made.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert [host.env for host in made.hosts] == [{}, {}]


def test_the_interface_that_the_user_chooses_wins() -> None:
    assert looked_at("ccl.interface=ib0").env["GLOO_SOCKET_IFNAME"] == "ib0"
    made = looked_at(environ={"GLOO_SOCKET_IFNAME": "ib1"})
    assert "GLOO_SOCKET_IFNAME" not in {**made.env, **made.hosts[0].env, **made.hosts[1].env}


def test_an_uninspected_host_has_no_interface() -> None:
    made = looked_at(hosts="a,c")
    assert [(host.assumed, host.env.get("GLOO_SOCKET_IFNAME")) for host in made.hosts] == [
        (False, "eth0"),
        (True, None),
    ]


def test_the_master_is_the_first_hosts_address() -> None:
    assert looked_at().master_addr == "10.0.0.1"
    assert looked_at(hosts="b,a").master_addr == "10.0.0.2"
    assert looked_at(hosts="c,a").master_addr == "c"
    assert looked_at("hosts.master_addr=head").master_addr == "head"


@pytest.mark.parametrize(
    ("hosts", "names", "expected"),
    [
        ("localhost", (), "127.0.0.1"),
        ("localhost,b", ("localhost", "127.0.0.1", "::1", "node7"), "node7"),
        ("127.0.0.1,b", ("node7.example", "127.0.0.1"), "node7.example"),
        ("head,b", ("localhost", "node7"), "head"),
    ],
)
def test_other_hosts_never_get_a_loopback_address(hosts: str, names: tuple[str, ...], expected: str) -> None:
    """An example is a dry run, which doesn't look for an address."""
    first = hosts.partition(",")[0]
    made = looked_at(hosts=hosts, known={first: replace(SMALL, names=frozenset(names))})
    assert (made.master_addr, made.env["MASTER_ADDR"]) == (expected, expected)
    note = f"the ranks meet at {expected}, as {first} is a loopback address"
    assert (note in made.notes) == expected.startswith("node7")


def test_a_detected_address_of_localhost_is_used() -> None:
    made = looked_at(hosts="localhost,b", known={"localhost": host("eth0", "10.0.0.1")})
    assert (made.master_addr, made.notes) == ("10.0.0.1", ())


@pytest.mark.parametrize(
    ("settings", "hosts", "known", "message"),
    [
        ((), "localhost,b", {}, "other hosts can't reach localhost"),
        ((), "localhost,b", {"localhost": host("lo", "127.0.0.1")}, "other hosts can't reach 127.0.0.1"),
        (("hosts.master_addr=127.0.0.1",), "a,b", KNOWN, "127.0.0.1 is a loopback address"),
        (("hosts.master_addr=localhost",), "a,b", KNOWN, "localhost is a loopback address"),
    ],
)
def test_without_an_address_for_other_hosts_there_is_no_plan(
    settings: tuple[str, ...], hosts: str, known: Mapping[str, HostFacts], message: str
) -> None:
    with pytest.raises(CpulaunchError, match=message):
        looked_at(*settings, hosts=hosts, known=known)


def test_instances_have_no_rendezvous() -> None:
    assert "MASTER_ADDR" not in looked_at("instances.count=2", hosts="localhost,b", known={}).env


def transport(plan: Plan) -> tuple[str, str | None, tuple[str, str]]:
    """Return the transport in the plan and in the ranks' environment, and the setting with its origin."""
    return plan.transport, plan.env.get("CPULAUNCH_RANK_CCL_TRANSPORT"), setting(plan, "ccl.transport")


@pytest.mark.parametrize(
    ("hosts", "settings", "environ", "planned", "setting"),
    [
        ("", (), {}, "shm", ("shm", "detected")),
        ("a:2,b:1", (), {}, "shm+tcp", ("shm+tcp", "detected")),
        ("a:1,b:1", ("ccl.provider=psm3",), {}, "ofi", ("ofi", "detected")),
        ("a,b", ("ccl.transport=ofi",), {}, "shm+ofi", ("ofi", "--ccl.transport")),
        ("a,b", ("env=FI_PROVIDER=psm3",), {}, "shm+ofi", ("shm+ofi", "detected")),
        ("a,b", (), {"CCL_WORKER_COUNT": "2"}, "oneccl", ("oneccl", "detected")),
        ("a,b", ("env=CCL_ALLREDUCE=ring",), {}, "oneccl", ("oneccl", "detected")),
        ("a,b", ("ccl.binding=oneccl_bind_pt",), {}, "oneccl", ("oneccl", "detected")),
        ("a,b", ("ccl.binding=oneccl_bind_pt", "ccl.transport=tcp"), {}, "oneccl", ("oneccl", "detected")),
        (
            "a,b",
            ("ccl.binding=oneccl_bind_pt", "ccl.transport=ofi"),
            {},
            "oneccl",
            ("ofi", "--ccl.transport"),
        ),
        ("a:2,b", ("ccl.transport=tcp", "ccl.worker_count=2"), {}, "shm+tcp", ("tcp", "--ccl.transport")),
        ("", ("mpi.flavour=intel", "ccl.transport=mpi"), {}, "mpi", ("mpi", "--ccl.transport")),
        ("a,b", (), {"CCL_ATL_TRANSPORT": "mpi"}, "mpi", ("mpi", "$CCL_ATL_TRANSPORT")),
        ("", ("env=CCL_ATL_TRANSPORT=ofi",), {}, "shm", ("ofi", "--env CCL_ATL_TRANSPORT")),
    ],
    ids=str,
)
def test_the_plan_names_the_transport_of_collectives(
    hosts: str, settings: tuple[str, ...], environ: dict[str, str], planned: str, setting: tuple[str, str]
) -> None:
    made = make(*settings, hosts=hosts, environ=environ)
    assert transport(made) == (planned, planned, setting)
    assert made.env["CCL_ATL_TRANSPORT"] == ("mpi" if planned == "mpi" else "ofi")


def test_replacing_a_transport_that_oneccl_bind_pt_lacks_is_noted() -> None:
    made = make("ccl.binding=oneccl_bind_pt", "ccl.transport=tcp", hosts="a,b")
    (note,) = (note for note in made.notes if "oneccl_bind_pt" in note)
    assert note == "ccl.transport (--ccl.transport): oneccl_bind_pt has no tcp; it uses oneccl"
    for settings in ((), ("ccl.transport=ofi",), ("mpi.flavour=intel", "ccl.transport=mpi")):
        assert not make("ccl.binding=oneccl_bind_pt", *settings, hosts="a,b").notes


def test_libfabric_drives_a_card_unless_the_user_wants_tcp() -> None:
    assert with_cards((VERBS,), (VERBS,)).transport == "ofi"
    assert with_cards((VERBS,), (BROKEN,)).transport == "tcp"
    forced = with_cards((VERBS,), (VERBS,), settings=("ccl.transport=tcp",))
    assert (forced.transport, forced.env["FI_PROVIDER"], forced.notes) == ("tcp", "tcp", ())


def test_collectives_on_gloo_have_gloos_own_transport() -> None:
    assert transport(make("training.backend=gloo")) == ("", None, ("auto", "default"))


def test_a_rank_that_starts_a_job_does_not_pass_on_its_transport() -> None:
    outer = make()
    environ = {name: value for name, value in outer.env.items() if name != "MASTER_ADDR"}
    inner = make(hosts="a:2,b", environ=environ)
    assert transport(inner) == ("shm+tcp", "shm+tcp", ("shm+tcp", "detected"))
    gloo = make("training.backend=gloo", environ=dict(outer.env))
    assert transport(gloo) == ("", "auto", ("auto", "default"))


PORTS = "hosts.port_range=20000-20099"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("training.backend=gloo",), "gloo can't keep its ports within a range"),
        (("ccl.binding=oneccl_bind_pt",), "oneccl_bind_pt can't keep its ports within a range"),
        (("hosts.master_port=29500",), "port 29500 is outside of hosts.port_range"),
    ],
)
def test_nothing_listens_outside_of_the_ports_that_the_user_allows(
    settings: tuple[str, ...], says: str
) -> None:
    with pytest.raises(CpulaunchError, match=says):
        looked_at(PORTS, *settings)


def test_a_range_with_too_few_ports_for_a_host_is_an_error() -> None:
    """The first host needs a port for each rank, and MASTER_PORT."""
    looked_at("hosts.port_range=20000-20002", "hosts.nproc_per_node=2")
    with pytest.raises(PlanError, match="2 ports, but a host needs at least 3"):
        looked_at("hosts.port_range=20000-20001", "hosts.nproc_per_node=2")


def test_each_library_gets_the_users_ports() -> None:
    made = looked_at(PORTS, "hosts.master_port=20005")
    assert made.env["FI_TCP_PORT_LOW_RANGE"] == "20000"
    assert made.env["FI_TCP_PORT_HIGH_RANGE"] == "20099"
    assert made.env["CPULAUNCH_RANK_PORT_RANGE"] == "20000-20099"
    assert not made.notes
    (note,) = looked_at(PORTS, "training.as_written=true").notes
    assert "a gloo group that the script makes listens on any port" in note


@pytest.mark.parametrize(
    ("mpi", "expected"),
    [
        ("intel", {"I_MPI_PORT_RANGE": "20000:20099"}),
        ("mpich", {"MPIR_CVAR_CH3_PORT_RANGE": "20000:20099", "UCX_TCP_PORT_RANGE": "20000-20099"}),
        (
            "openmpi",
            {
                "PRTE_MCA_oob_tcp_dynamic_ipv4_ports": "20000-20099",
                "OMPI_MCA_btl_tcp_port_min_v4": "20000",
                "OMPI_MCA_btl_tcp_port_range_v4": "100",
            },
        ),
    ],
)
def test_mpiexec_gets_the_users_ports(mpi: str, expected: dict[str, str]) -> None:
    def environment(*settings: str) -> Mapping[str, str]:
        found = (Mpi(mpi, f"/{mpi}/mpiexec", "1"),)
        made = make(f"mpi.flavour={mpi}", *settings, hosts="a,b", hosts_known=KNOWN, mpis=found)
        (command,) = load(made.launcher).commands(made, Installation("/agent.py", "/ssh.sh", "/spawner.py"))
        return command.env

    assert expected.items() <= environment(PORTS).items()
    assert not expected.keys() & environment().keys()
