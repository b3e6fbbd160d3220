"""The common launcher of Intel MPI, MPICH and Open MPI: one mpiexec command with each MPI's own options.

Variables that a plan sets are arguments of the command, as an expert would write it.  Variables that the user
has set travel only by environment, as everyone can see arguments in ``ps``.
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

# Variables that each start of a job adds to the environment, for MPIs that forward variables only by name.
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
"""Seconds after the grace period until all agents that have noticed the launcher's end have ended."""

SSH_FAILURES = (
    r"ssh: connect to host (?P<host>\S+) port \d+: (?P<why>[^\r\n]+)",
    r"ssh: Could not resolve hostname (?P<host>[^\s:]+): (?P<why>[^\r\n]+)",
)


@dataclass(frozen=True)
class Mpiexec(Launcher):
    """The mpiexec of one MPI, and its options.  In options, ``{…}`` is replaced by a value.

    The program: its ``--version`` prints one of ``version_words``.  ``executables`` are its names, the
    preferred first.  ``called_by_script`` is the program that its mpirun, a shell script, calls; cpulaunch
    calls that program itself, as killing the script would leave the job running.  ``wheel`` is its package on
    PyPI.

    Arguments: ``always`` are arguments of every job.  ``stdin`` gives mpiexec's stdin to a rank other than 0;
    it is empty if the MPI can't do that.  ``ranks_per_host`` is used if all hosts have the same number of
    ranks.  Otherwise, the counts in the hostfile apply, and ``count_variables``, which would override them,
    are unset.  ``forward_variable`` forwards a variable by name, for an MPI that forwards none by itself.

    Variables: ``hostfile_variables`` name the default hostfile.  ``env`` is set for mpiexec itself; it
    switches off the MPI's own pinning and its use of a surrounding Slurm allocation.  ``watched_env`` is
    added if a launcher reads mpiexec's output and the user hasn't set these variables.  ``ssh`` is the
    variable for the program that reaches hosts.  ``interface`` is the variable for mpiexec's own network,
    with its value.  ``ports`` keeps what mpiexec, its daemons and the ranks' MPI listen on within a range.

    Limits: ``over_ipv6`` are arguments for hosts that are reached by IPv6, None if none can be.
    ``interface_takes_ipv6`` says whether that network may be IPv6, ``takes_ipv6`` whether the hostfile may
    have IPv6 addresses, and ``takes_spaces`` whether paths used on other hosts may have spaces.

    End and errors: on the signal ``when_orphaned``, mpiexec ends all that it started; it is 0 if agents would
    get no time then, and mpiexec is ended later instead.  ``leaves`` is the directory that mpiexec leaves
    when it is killed, with ``{pid}`` for its pid.  ``failures`` are patterns of its messages on failed
    starts, and ``last_failures`` are patterns that count only if its whole output has no better message.
    """

    name: str
    title: str
    identity: IdentityVariables
    version_words: tuple[str, ...]
    executables: tuple[str, ...]
    install_hint: str
    hostfile: tuple[str, ...]
    hostfile_variables: tuple[str, ...]
    host_line: str
    ranks_per_host: tuple[str, ...]
    directory: tuple[str, ...]
    set_variable: tuple[str, ...]
    ssh: str
    interface: tuple[str, str]
    count_variables: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    stdin: tuple[str, ...] = ()
    called_by_script: str = ""
    wheel: str = ""
    always: tuple[str, ...] = ()
    forward_variable: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    ports: dict[str, str] = field(default_factory=dict)
    watched_env: dict[str, str] = field(default_factory=dict)
    when_orphaned: int = 0
    leaves: str = ""
    always_hostfile: bool = False
    over_ipv6: tuple[str, ...] | None = ()
    interface_takes_ipv6: bool = True
    takes_ipv6: bool = False
    takes_spaces: bool = True
    failures: tuple[str, ...] = ()
    last_failures: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    passes_environment: bool = True
    daemon_outlives_link: bool = False
    is_intel_mpi: bool = False
    # After a lost link, mpiexec of Intel MPI and of Open MPI need SIGINT twice.
    stop_signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGKILL)
    reach: Reach = field(default_factory=Ssh)

    def commands(self, plan: Plan, installation: Installation) -> tuple[Command, ...]:
        """The one mpiexec command of a plan."""
        self._check_addresses(plan)
        self._check_paths(plan, installation)
        placement = placement_variables(plan, self)
        files = {}
        env = {**self.env, **self._ports(plan)}
        argv = [plan.mpiexec or self.executables[0], *self.always, *self._over_ipv6(plan)]
        if self.always_hostfile or not plan.here_alone:
            lines = (self.host_line.format(host=h.host, slots=len(h.ranks)) for h in plan.hosts)
            files[HOSTFILE] = "".join(line + "\n" for line in lines)
            argv += self.hostfile
        argv += ["-n", str(plan.world_size), *(per_host := self._ranks_per_host(plan))]
        argv += [word.format(path=plan.program.directory) for word in self.directory]
        argv += self._reader(plan.settings.output.stdin)
        for name, value in plan.env.items():
            if name not in plan.private:
                argv += [word.format(name=name, value=value) for word in self.set_variable]
        for name in (*JOB_VARIABLES, *placement, *env, *plan.forward):
            argv += [word.format(name=name) for word in self.forward_variable]
        argv += [*plan.mpi_args, *agent_argv(plan, installation)]
        command = Command(
            tuple(argv),
            {**env, **self._reaching(plan, installation), **placement},
            files,
            watched_env=_unless_users(plan, self.watched_env),
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

    def _reader(self, rank: int) -> list[str]:
        if rank and not self.stdin:
            raise PlanError(
                f"mpiexec of {self.name} gives its stdin to rank 0 alone, and not to rank {rank}",
                hint="--launcher local, ssh, slurm, or mpirun with --mpi intel or openmpi can",
            )
        return [word.format(rank=rank) for word in self.stdin] if rank else []

    def _ranks_per_host(self, plan: Plan) -> list[str]:
        counts = {len(host.ranks) for host in plan.hosts}
        return [word.format(slots=min(counts)) for word in self.ranks_per_host] if len(counts) == 1 else []

    def _over_ipv6(self, plan: Plan) -> tuple[str, ...]:
        ours = plan.egress_interface
        if plan.here_alone or not ours or ":" not in ours.address:
            return ()
        if self.over_ipv6 is None:
            raise PlanError(
                f"mpiexec of {self.name} reaches hosts by IPv4 only, and the way from here to "
                f"{plan.hosts[-1].host} is IPv6",
                hint="--launcher ssh, or --mpi intel or openmpi, can use it",
            )
        return self.over_ipv6

    def _check_addresses(self, plan: Plan) -> None:
        ipv6 = [host.host for host in plan.hosts if ":" in host.host]
        if ipv6 and not self.takes_ipv6:
            raise PlanError(
                f"mpiexec of {self.name} takes no IPv6 address for a host: {ipv6[0]}",
                hint="--launcher ssh and --mpi openmpi do; --mpi intel takes names for it",
            )

    def _check_paths(self, plan: Plan, installation: Installation) -> None:
        if plan.here_alone or self.takes_spaces:
            return
        ours = "" if self.ssh in plan.user_mpi_variables else installation.ssh
        for path, remedy in (
            (plan.mpiexec, f"--mpi-path names another {self.title}"),
            (ours, "install cpulaunch in an environment without one"),
        ):
            if " " in path:
                raise PlanError(
                    f"{self.title} starts nothing on other hosts where a path has a space: {path}",
                    hint=f"{remedy}; Intel MPI and MPICH work with such paths",
                )

    def _reaching(self, plan: Plan, installation: Installation) -> dict[str, str]:
        """Variables for our ssh and the interface found by the probe, except those that the user has set."""
        if plan.here_alone:
            return {}
        env = {self.ssh: installation.ssh}
        if patience := plan.env.get(variables.HEARTBEAT_TIMEOUT):
            env[variables.HEARTBEAT_TIMEOUT] = patience  # for our ssh
        ours = plan.egress_interface
        if ours and (self.interface_takes_ipv6 or ":" not in ours.address):
            name, value = self.interface
            env[name] = value.format(name=ours.name, network=ours.network)
        return _unless_users(plan, env)


def _unless_users(plan: Plan, env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in plan.user_mpi_variables}
