"""Plans for hosts that were looked at: each one's interface, the master's address, how mpiexec reaches them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpulaunch import launchers
from cpulaunch.config.load import load
from cpulaunch.discovery.lscpu import topology_from_lscpu
from cpulaunch.errors import PlanError
from cpulaunch.launchers.command import Command
from cpulaunch.model.facts import Facts, HostFacts, Mpi
from cpulaunch.model.hosts import parse_hosts
from cpulaunch.model.installation import Installation
from cpulaunch.model.network import Interface
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.plan import Plan, Program

TWO_CORES = topology_from_lscpu("# CPU,Core,Socket,Node\n0,0,0,0\n1,1,0,0\n")
PROGRAM = Program(("/venv/bin/python", "train.py"), True, "/home/me", "/venv/bin/python")
EGRESS = Interface("eno1", "10.0.0.9", 24)
MPIS = {name: Mpi(name, f"/mpi/{name}", "1.0") for name in ("intel", "mpich", "openmpi")}


def host(interface: str, address: str) -> HostFacts:
    return HostFacts(TWO_CORES, cpu_flags=("amx_bf16",), interface=interface, address=address)


KNOWN = {"a": host("eth0", "10.0.0.1"), "b": host("ens5", "10.0.0.2")}


def make(
    *settings: str,
    hosts: str = "a,b",
    mpi: str = "intel",
    known: dict[str, HostFacts] = KNOWN,
    egress: Interface | None = EGRESS,
    **environ: str,
) -> Plan:
    given = [(*setting.split("=", 1), "--" + setting.split("=")[0]) for setting in settings]
    config = load(given, environ={"HOME": "/nowhere", **environ})
    facts = Facts(
        like=HostFacts(TWO_CORES),
        listed=parse_hosts(hosts, "--hosts"),
        hosts=known,
        here=frozenset({"localhost"}),
        mpis=(MPIS[mpi],),
        egress_interface=egress,
    )
    return make_plan(config, facts, PROGRAM)


def render(made: Plan) -> tuple[Command, ...]:
    return launchers.load(made.launcher).commands(made, Installation("/venv/run_agent.py", "/venv/ssh.sh"))


def mpiexec_env(made: Plan) -> dict[str, str]:
    env = render(made)[0].env
    return {
        k: v for k, v in env.items() if k.startswith(("I_MPI_HYDRA", "HYDRA", "PRTE")) and k[-3:] != "RMK"
    }


def test_each_host_gets_its_own_interface() -> None:
    made = make("training.backend=ccl")
    names = ("GLOO_SOCKET_IFNAME", "CCL_KVS_IFACE", "FI_TCP_IFACE")
    assert [[host.env[name] for name in names] for host in made.hosts] == [["eth0"] * 3, ["ens5"] * 3]
    assert not set(names) & set(made.env)


def test_one_that_all_share_is_said_once() -> None:
    made = make(known={name: host("eth0", f"10.0.0.{n}") for n, name in enumerate("ab")})
    assert made.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert [host.env for host in made.hosts] == [{}, {}]


def test_what_the_user_said_wins() -> None:
    assert make("ccl.interface=ib0").env["GLOO_SOCKET_IFNAME"] == "ib0"
    made = make(GLOO_SOCKET_IFNAME="ib1")
    assert "GLOO_SOCKET_IFNAME" not in {**made.env, **made.hosts[0].env, **made.hosts[1].env}


def test_a_host_that_nobody_looked_at_has_no_interface() -> None:
    made = make(hosts="a,c")
    assert [(host.assumed, host.env.get("GLOO_SOCKET_IFNAME")) for host in made.hosts] == [
        (False, "eth0"),
        (True, None),
    ]


def test_the_master_is_the_first_hosts_address() -> None:
    assert make().master_addr == "10.0.0.1"
    assert make(hosts="b,a").master_addr == "10.0.0.2"
    assert make(hosts="c,a").master_addr == "c"
    assert make("hosts.master_addr=head").master_addr == "head"


@pytest.mark.parametrize(
    ("mpi", "ssh", "interface"),
    [
        ("intel", "I_MPI_HYDRA_BOOTSTRAP_EXEC", {"I_MPI_HYDRA_IFACE": "eno1"}),
        ("mpich", "HYDRA_LAUNCHER_EXEC", {"HYDRA_IFACE": "eno1"}),
        ("openmpi", "PRTE_MCA_plm_ssh_agent", {"PRTE_MCA_prte_if_include": "10.0.0.0/24"}),
    ],
)
def test_mpiexec_is_told_our_ssh_and_our_interface(mpi: str, ssh: str, interface: dict[str, str]) -> None:
    env = mpiexec_env(make(mpi=mpi))
    assert env.pop(ssh) == "/venv/ssh.sh"
    env = {k: v for k, v in env.items() if v != "ssh"}
    assert env == interface
    (name,) = interface
    users = mpiexec_env(make(mpi=mpi, **{ssh: "/usr/bin/rsh", name: "x"}))
    assert not {ssh, name} & set(users)


def test_hydra_does_not_study_the_machine_unless_the_user_says_so() -> None:
    assert render(make())[0].watched_env == {"I_MPI_HYDRA_TOPOLIB": "ipl"}
    assert render(make(I_MPI_HYDRA_TOPOLIB="hwloc"))[0].watched_env == {}


def test_a_plan_survives_json() -> None:
    made = make(I_MPI_HYDRA_IFACE="x")
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize("mpi", ["intel", "mpich"])
def test_hydra_takes_no_ipv6_address(mpi: str) -> None:
    with pytest.raises(PlanError, match=f"mpiexec of {mpi} takes no IPv6 address for a host: fd00::2"):
        render(make(hosts="a,fd00::2", mpi=mpi))


def test_open_mpi_does() -> None:
    six = Interface("eth0", "fd00::9", 64)
    (command,) = render(make(hosts="fd00::1,[fd00::2]:2", mpi="openmpi", egress=six, known={}))
    assert command.files["hostfile"] == "fd00::1 slots=1\nfd00::2 slots=2\n"
    assert "PRTE_MCA_prte_if_include" not in command.env


def test_one_host_whose_cpu_lacks_bf16_makes_it_fp32() -> None:
    known = {
        **KNOWN,
        "a": replace(KNOWN["a"], cpu_flags=("amx_bf16",)),
        "b": replace(KNOWN["b"], cpu_flags=()),
    }
    made = make(known=known)
    assert made.env["CPULAUNCH_PRECISION"] == "fp32"
    assert made.notes == ("precision fp32, as the CPU of b has no instructions for bf16",)
    insisted = make("training.precision=bf16", known=known)
    assert insisted.env["CPULAUNCH_PRECISION"] == "bf16"
    assert insisted.notes == ("bf16 is slow here: the CPU of b has no instructions for it",)
