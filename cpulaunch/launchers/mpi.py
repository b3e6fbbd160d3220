"""The common launcher of Intel MPI, MPICH and Open MPI: one mpiexec command.

Variables that the plan sets are arguments of the command.  Variables that the user has set are passed only in
the environment, because every user can read arguments with ``ps``.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

from cpulaunch import variables
from cpulaunch.errors import PlanError
from cpulaunch.launchers.agent_command import agent_argv, placement_variables
from cpulaunch.launchers.base import Launcher, StartFailure
from cpulaunch.launchers.command import Command, Installation
from cpulaunch.launchers.reach import Reach, Ssh
from cpulaunch.plan.placement import IdentityVariables
from cpulaunch.plan.plan import Plan

HOSTFILE = "hostfile"

# Variables of each attempt, which some MPIs forward only by name.
JOB_VARIABLES = (
    variables.CONTROL,
    variables.JOB_ID,
    variables.RESTART_COUNT,
    variables.MAX_RESTARTS,
    variables.TOKEN,
    variables.GROUPS_KEY,
    "MASTER_PORT",
)

ORPHAN_MARGIN = 5.0
"""Seconds that agents get in addition to the grace period, to notice the launcher's death and exit."""

SSH_FAILURES = (
    r"ssh: connect to host (?P<host>\S+) port \d+: (?P<why>[^\r\n]+)",
    r"ssh: Could not resolve hostname (?P<host>[^\s:]+): (?P<why>[^\r\n]+)",
)


@dataclass(frozen=True)
class Mpiexec(Launcher):
    """The mpiexec of one MPI.  Texts such as ``{host}`` in its options are replaced by values."""

    name: str
    title: str
    identity: IdentityVariables

    # The program
    version_words: tuple[str, ...]  # ``mpiexec --version`` prints one of them
    executables: tuple[str, ...]  # the preferred name first
    install_hint: str

    # Arguments
    hostfile: tuple[str, ...]
    hostfile_variables: tuple[str, ...]  # environment variables for the default hostfile
    host_line: str  # a line of the hostfile
    ranks_per_host: tuple[str, ...]  # used if all hosts have the same number of ranks
    directory: tuple[str, ...]
    set_variable: tuple[str, ...]

    # Network
    ssh: str  # the variable for the program to use instead of ssh
    interface: tuple[str, str]  # variable and value that select mpiexec's own network

    # The rest is optional.
    called_by_script: str = ""  # the program that the script mpirun calls; killing the script leaves the job
    wheel: str = ""  # the package on PyPI
    always: tuple[str, ...] = ()  # arguments of every job
    always_hostfile: bool = False  # even if all ranks are on the launching host
    stdin: tuple[str, ...] = ()  # selects the rank that reads stdin; empty if it is always rank 0
    count_variables: tuple[str, ...] = ()  # unset if hosts have different numbers of ranks
    forward_variable: tuple[str, ...] = ()  # forwards a variable by name; empty if mpiexec forwards all
    env: dict[str, str] = field(default_factory=dict)  # switches off pinning and the use of Slurm
    watched_env: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    ports: dict[str, str] = field(default_factory=dict)  # limit mpiexec and MPI to a range of ports
    over_ipv6: tuple[str, ...] | None = ()  # arguments to reach hosts by IPv6; None if mpiexec can't
    interface_takes_ipv6: bool = True  # whether ``interface`` may select an IPv6 network
    takes_ipv6: bool = False  # whether the hostfile may contain IPv6 addresses
    takes_spaces: bool = True  # whether paths on other hosts may contain spaces
    when_orphaned: int = 0  # 0 if this signal would end the agents without a grace period
    leaves: str = ""
    failures: tuple[str, ...] = ()  # patterns of messages about failed starts
    last_failures: tuple[str, ...] = ()  # the same, for use only if the complete output has no other message
    noise: tuple[str, ...] = ()
    passes_environment: bool = True
    daemon_outlives_link: bool = False
    is_intel_mpi: bool = False
    # If the network was lost, mpiexec of Intel MPI and of Open MPI need SIGINT twice.
    stop_signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGKILL)
    reach: Reach = field(default_factory=Ssh)

    def commands(self, plan: Plan, installation: Installation) -> tuple[Command, ...]:
        """Return the single mpiexec command of ``plan``."""
        self._check_addresses(plan)
        self._check_paths(plan, installation)
        placement = placement_variables(plan, self)
        files = {}
        env = {**self.env, **self._ports(plan)}
        argv = [plan.mpiexec or self.executables[0], *self.always, *self._ipv6_arguments(plan)]
        if self.always_hostfile or not plan.here_alone:
            lines = (self.host_line.format(host=h.host, slots=len(h.ranks)) for h in plan.hosts)
            files[HOSTFILE] = "".join(line + "\n" for line in lines)
            argv += self.hostfile
        argv += ["-n", str(plan.world_size), *(per_host := self._ranks_per_host(plan))]
        argv += [word.format(path=plan.program.directory) for word in self.directory]
        argv += self._stdin_arguments(plan.settings.output.stdin)
        for name, value in plan.env.items():
            if name not in plan.private:
                argv += [word.format(name=name, value=value) for word in self.set_variable]
        for name in (*JOB_VARIABLES, *placement, *env, *plan.forward):
            argv += [word.format(name=name) for word in self.forward_variable]
        argv += [*plan.mpi_args, *agent_argv(plan, installation)]
        command = Command(
            tuple(argv),
            {**env, **self._network_variables(plan, installation), **placement},
            files,
            watched_env=_without_user_variables(plan, self.watched_env),
            when_orphaned=self.when_orphaned,
            orphaned_for=0 if self.when_orphaned else plan.settings.watch.grace_period + ORPHAN_MARGIN,
            leaves=self.leaves,
            unset=(*plan.left_out, *(() if per_host else self.count_variables)),
        )
        return (command,)

    @property
    def users_variables(self) -> tuple[str, ...]:
        return self.ssh, self.interface[0], *self.watched_env

    def start_failure(self, text: str, *, ended: bool = False) -> StartFailure | None:
        patterns = (*SSH_FAILURES, *self.failures, *(self.last_failures if ended else ()))
        for pattern in patterns:
            if match := re.search(pattern, text):
                return StartFailure(match["host"], match["why"])
        return None

    def _ports(self, plan: Plan) -> dict[str, str]:
        ports = plan.settings.hosts.ports
        if ports is None:
            return {}
        ends = {"first": ports[0], "last": ports[-1], "count": len(ports)}
        return {name: value.format(**ends) for name, value in self.ports.items()}

    def _stdin_arguments(self, rank: int) -> list[str]:
        if rank and not self.stdin:
            raise PlanError(
                f"--stdin {rank}: mpiexec of {self.name} can pass stdin only to rank 0",
                hint="use --launcher local, ssh or slurm, or mpirun with --mpi intel or openmpi",
            )
        return [word.format(rank=rank) for word in self.stdin] if rank else []

    def _ranks_per_host(self, plan: Plan) -> list[str]:
        counts = {len(host.ranks) for host in plan.hosts}
        return [word.format(slots=min(counts)) for word in self.ranks_per_host] if len(counts) == 1 else []

    def _ipv6_arguments(self, plan: Plan) -> tuple[str, ...]:
        local = plan.egress_interface
        if plan.here_alone or not local or ":" not in local.address:
            return ()
        if self.over_ipv6 is None:
            raise PlanError(
                f"mpiexec of {self.name} needs IPv4, but {plan.hosts[-1].host} is reached by IPv6",
                hint="use --launcher ssh, or --mpi intel or openmpi",
            )
        return self.over_ipv6

    def _check_addresses(self, plan: Plan) -> None:
        ipv6 = [host.host for host in plan.hosts if ":" in host.host]
        if ipv6 and not self.takes_ipv6:
            raise PlanError(
                f"mpiexec of {self.name} accepts no IPv6 address as a host: {ipv6[0]}",
                hint="use --launcher ssh or --mpi openmpi, or host names with --mpi intel",
            )

    def _check_paths(self, plan: Plan, installation: Installation) -> None:
        if plan.here_alone or self.takes_spaces:
            return
        local = "" if self.ssh in plan.user_mpi_variables else installation.ssh
        for path, remedy in (
            (plan.mpiexec, f"use --mpi-path to select another {self.title}"),
            (local, "install cpulaunch into an environment whose path has no space"),
        ):
            if " " in path:
                raise PlanError(
                    f"{self.title} can't start ranks on other hosts if a path contains a space: {path}",
                    hint=f"{remedy}; Intel MPI and MPICH accept such paths",
                )

    def _network_variables(self, plan: Plan, installation: Installation) -> dict[str, str]:
        """Variables that select our ssh and the interface, except those that the user has set."""
        if plan.here_alone:
            return {}
        env = {self.ssh: installation.ssh}
        if patience := plan.env.get(variables.HEARTBEAT_TIMEOUT):
            env[variables.HEARTBEAT_TIMEOUT] = patience  # ssh.sh reads it
        local = plan.egress_interface
        if local and (self.interface_takes_ipv6 or ":" not in local.address):
            name, value = self.interface
            env[name] = value.format(name=local.name, network=local.network)
        return _without_user_variables(plan, env)


def _without_user_variables(plan: Plan, env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in plan.user_mpi_variables}
