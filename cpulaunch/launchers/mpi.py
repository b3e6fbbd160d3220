"""Starters ``intel``, ``mpich`` and ``openmpi``: one row of words for each MPI's mpiexec.

What a plan sets is in the command in plain sight, as an expert would write it; what the user set
travels by environment only, as argument lists show in every ``ps``.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from cpulaunch import variables
from cpulaunch.errors import PlanError
from cpulaunch.launchers.agent_command import SSH, agent_argv, placement_variable
from cpulaunch.launchers.command import Command
from cpulaunch.plan.plan import Plan

HOSTFILE = "hostfile"

# What execute adds to the environment at each start, for those MPIs that must be told the names.
JOB_VARIABLES = (
    variables.CONTROL,
    variables.JOB_ID,
    variables.RESTART_COUNT,
    variables.TOKEN,
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Flavour:
    """How one MPI's mpiexec says things.  ``{…}`` stand for values.

    ``equal`` says ranks per host where all hosts have as many; else the hostfile's counts do.
    ``forward`` hands on a variable by name, for an MPI that hands on nothing by itself.
    ``env`` is for mpiexec itself: it switches the MPI's own pinning off, and its hosts are ours,
    not those of a Slurm allocation around us.  ``watched_env`` is, too, where we read what it says, and
    the user has said nothing else.  ``when_orphaned`` is the signal on which it ends all that it started.
    ``ssh`` is the variable for the program to reach hosts with, ``interface`` the one for its own
    network, with its value.
    """

    fixed: tuple[str, ...]
    hostfile: tuple[str, ...]
    host_line: str
    equal: tuple[str, ...]
    directory: tuple[str, ...]
    set: tuple[str, ...]
    ssh: str
    interface: tuple[str, str]
    forward: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    watched_env: dict[str, str] = field(default_factory=dict)
    when_orphaned: int = 0
    always_hostfile: bool = False


FLAVOURS = {
    "intel": Flavour(
        fixed=(),
        hostfile=("-f", HOSTFILE),
        host_line="{host}:{slots}",
        equal=("-ppn", "{slots}"),
        directory=("-wdir", "{path}"),
        set=("-genv", "{name}", "{value}"),
        ssh="I_MPI_HYDRA_BOOTSTRAP_EXEC",
        interface=("I_MPI_HYDRA_IFACE", "{name}"),
        env={"I_MPI_PIN": "off", "I_MPI_HYDRA_BOOTSTRAP": "ssh", "I_MPI_HYDRA_RMK": "user"},
        # As we bind, it needn't study the machine, with which it starts in 40 ms (hwloc: 30) instead of 8.
        # Where there are no NUMA nodes, it says so on stdout, which the launcher keeps to itself.
        watched_env={"I_MPI_HYDRA_TOPOLIB": "ipl"},
        when_orphaned=signal.SIGTERM,
    ),
    "mpich": Flavour(
        fixed=(),
        hostfile=("-f", HOSTFILE),
        host_line="{host}:{slots}",
        equal=("-ppn", "{slots}"),
        directory=("-wdir", "{path}"),
        set=("-genv", "{name}", "{value}"),
        ssh="HYDRA_LAUNCHER_EXEC",
        interface=("HYDRA_IFACE", "{name}"),
        env={"HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "user"},
        when_orphaned=signal.SIGTERM,
    ),
    "openmpi": Flavour(
        fixed=("--allow-run-as-root", "--bind-to", "none"),
        hostfile=("--hostfile", HOSTFILE),
        host_line="{host} slots={slots}",
        equal=("--map-by", "ppr:{slots}:node"),
        directory=("--wdir", "{path}"),
        set=("-x", "{name}={value}"),
        ssh="PRTE_MCA_plm_ssh_agent",
        # Named by its network, as its name may be another on the next host.
        interface=("PRTE_MCA_prte_if_include", "{network}"),
        forward=("-x", "{name}"),
        # Without one, it takes this machine's cores for slots, and refuses more ranks.
        always_hostfile=True,
    ),
}


def commands(plan: Plan) -> tuple[Command, ...]:
    """The one mpiexec command of a plan."""
    words = FLAVOURS[plan.starter]
    counts = [len(host.ranks) for host in plan.hosts]
    if words.host_line.startswith("{host}:") and (six := [h.host for h in plan.hosts if ":" in h.host]):
        raise PlanError(
            f"mpiexec of {plan.starter} takes no IPv6 address for a host: {six[0]}",
            hint="names that stand for it will do, as will --mpi openmpi",
        )
    argv = [plan.mpiexec, *words.fixed]
    files = {}
    if words.always_hostfile or not plan.here_alone:
        lines = (words.host_line.format(host=h.host, slots=len(h.ranks)) for h in plan.hosts)
        files[HOSTFILE] = "".join(line + "\n" for line in lines)
        argv += words.hostfile
    argv += ["-n", str(plan.world_size)]
    if len(set(counts)) == 1:
        argv += [word.format(slots=counts[0]) for word in words.equal]
    argv += [word.format(path=plan.program.directory) for word in words.directory]
    for name, value in plan.env.items():
        if name not in plan.private:
            argv += [word.format(name=name, value=value) for word in words.set]
    if words.forward:
        for name in (*JOB_VARIABLES, *placement_variable(plan), *words.env, *plan.forward):
            argv += [word.format(name=name) for word in words.forward]
    argv += [*plan.mpi_args, *agent_argv(plan)]
    command = Command(
        tuple(argv),
        {**words.env, **_reaching(plan, words), **placement_variable(plan)},
        files,
        watched_env=_unless_said(plan, words.watched_env),
        when_orphaned=words.when_orphaned,
    )
    return (command,)


def _reaching(plan: Plan, words: Flavour) -> dict[str, str]:
    """How mpiexec reaches the hosts: as the user has said, else by our ssh and the interface found."""
    if plan.here_alone:
        return {}
    env = {words.ssh: SSH}
    # Hydra finds an interface by its name; Open MPI's networks are of IPv4 only.
    if plan.way_out and not ("network" in words.interface[1] and ":" in plan.way_out.address):
        name, value = words.interface
        env[name] = value.format(name=plan.way_out.name, network=plan.way_out.network)
    return _unless_said(plan, env)


def _unless_said(plan: Plan, env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in plan.said_to_mpi}
