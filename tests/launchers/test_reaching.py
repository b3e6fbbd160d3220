"""How mpiexec reaches hosts: with cpulaunch's ssh, over the planned interface, by the hosts' addresses."""

from __future__ import annotations

import pytest
from support.plans import SMALL, make

from cpulaunch import launchers
from cpulaunch.errors import PlanError
from cpulaunch.launchers.command import Command, Installation
from cpulaunch.model.facts import Mpi
from cpulaunch.model.network import Interface

EGRESS = Interface("eno1", "10.0.0.9", 24)


def mpiexec(
    mpi: str = "intel",
    *,
    hosts: str = "a,b",
    egress: Interface = EGRESS,
    directory: str = "/mpi",
    venv: str = "/venv",
    **environ: str,
) -> Command:
    """Return a job's mpiexec command, with mpiexec in ``directory`` and cpulaunch in ``venv``."""
    mpis = (Mpi(mpi, f"{directory}/{mpi}", "1.0"),)
    made = make(hosts=hosts, facts=SMALL, mpis=mpis, egress_interface=egress, environ=environ)
    installation = Installation(f"{venv}/run_agent.py", f"{venv}/ssh.sh", f"{venv}/run_spawner.py")
    (command,) = launchers.load(made.launcher).commands(made, installation)
    return command


def own_variables(command: Command) -> dict[str, str]:
    """Return the environment variables for mpiexec's own network."""
    own = ("I_MPI_HYDRA", "HYDRA", "PRTE")
    return {k: v for k, v in command.env.items() if k.startswith(own) and not k.endswith("RMK")}


@pytest.mark.parametrize(
    ("mpi", "ssh", "interface"),
    [
        ("intel", "I_MPI_HYDRA_BOOTSTRAP_EXEC", {"I_MPI_HYDRA_IFACE": "eno1"}),
        ("mpich", "HYDRA_LAUNCHER_EXEC", {"HYDRA_IFACE": "eno1"}),
        ("openmpi", "PRTE_MCA_plm_ssh_agent", {"PRTE_MCA_prte_if_include": "10.0.0.0/24"}),
    ],
)
def test_mpiexec_gets_cpulaunchs_ssh_and_interface(mpi: str, ssh: str, interface: dict[str, str]) -> None:
    env = own_variables(mpiexec(mpi))
    assert env.pop(ssh) == "/venv/ssh.sh"
    env = {k: v for k, v in env.items() if v != "ssh"}
    assert env == interface
    (name,) = interface
    users = own_variables(mpiexec(mpi, **{ssh: "/usr/bin/rsh", name: "x"}))
    assert not {ssh, name} & set(users)


@pytest.mark.parametrize(
    ("mpi", "name"),
    [
        ("intel", "I_MPI_PIN_DOMAIN"),
        ("mpich", "HYDRA_BINDING"),
        ("openmpi", "PRTE_MCA_plm"),
        ("openmpi", "PRTE_MCA_hwloc_default_binding_policy"),
    ],
)
def test_mpiexec_does_not_get_variables_that_pin_ranks_or_select_a_launcher(mpi: str, name: str) -> None:
    assert mpiexec(mpi, **{name: "x"}).unset == (name,)
    assert mpiexec(mpi).unset == ()


def test_hydra_inspects_the_machine_only_on_request() -> None:
    assert mpiexec().watched_env == {"I_MPI_HYDRA_TOPOLIB": "ipl"}
    assert mpiexec(I_MPI_HYDRA_TOPOLIB="hwloc").watched_env == {}


@pytest.mark.parametrize("mpi", ["intel", "mpich"])
def test_hydra_does_not_get_an_ipv6_address(mpi: str) -> None:
    with pytest.raises(PlanError, match=f"mpiexec of {mpi} accepts no IPv6 address as a host: fd00::2"):
        mpiexec(mpi, hosts="a,fd00::2")


def test_open_mpi_gets_an_ipv6_address() -> None:
    six = Interface("eth0", "fd00::9", 64)
    command = mpiexec("openmpi", hosts="fd00::1,[fd00::2]:2", egress=six)
    assert command.files["hostfile"] == "fd00::1 slots=1\nfd00::2 slots=2\n"
    assert "PRTE_MCA_prte_if_include" not in command.env


def test_open_mpi_is_refused_if_a_path_has_a_space() -> None:
    refused = "Open MPI can.t start ranks on other hosts if a path contains a space: "
    with pytest.raises(PlanError, match=f"(?m)^{refused}/my env/openmpi$") as error:
        mpiexec("openmpi", directory="/my env")
    assert str(error.value.hint).startswith("use --mpi-path to select another Open MPI; ")
    with pytest.raises(PlanError, match=f"(?m)^{refused}/my env/ssh.sh$"):
        mpiexec("openmpi", venv="/my env")
    mpiexec("openmpi", venv="/my env", PRTE_MCA_plm_ssh_agent="ssh")


@pytest.mark.parametrize("mpi", ["intel", "mpich"])
def test_other_mpis_accept_a_path_with_a_space(mpi: str) -> None:
    mpiexec(mpi, directory="/my env", venv="/my env")
