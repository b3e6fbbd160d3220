"""The launcher ssh: agents on several hosts, without any MPI.

Its single command is a spawner (``agent/spawner``), which starts the agents of this host, and by ssh a
spawner on each other host.  Environment and placement travel over ssh's stdin, as everyone can see arguments
in ``ps``.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal

from cpulaunch import variables
from cpulaunch.errors import PlanError
from cpulaunch.launchers.agent_command import agent_argv, placement_variables
from cpulaunch.launchers.base import Launcher, StartFailure
from cpulaunch.launchers.command import Command, Installation
from cpulaunch.launchers.reach import Ssh as SshReach
from cpulaunch.plan.placement import IdentityVariables
from cpulaunch.plan.plan import Plan

HOSTS = "hosts"
"""The name of the file of hosts: a line for each, with name, number of ranks, and ``here`` for this host."""

_FAILED = "cpulaunch: ssh: "
"""The prefix of the spawner's line of JSON about a host where nothing could be started."""

_CONNECTING = re.compile(r"^connect to host \S+ port \d+: ")
"""What ssh says before its reason."""


class Ssh(Launcher):
    name = "ssh"
    title = "ssh"
    identity = IdentityVariables(*variables.LOCAL_IDENTITY)
    # At the first signal, the spawner tells all agents to end; at the second, it kills them.
    stop_signals = (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
    reach = SshReach()
    noise = (_FAILED,)
    ranks_outlive_it = ends_with_network = True
    exit_patience = 0.5  # it would wait for hosts whose connection is lost

    def commands(self, plan: Plan, installation: Installation) -> tuple[Command, ...]:
        """The single command of a plan.  Raises PlanError for arguments of an MPI."""
        if plan.mpi_args:
            raise PlanError(
                f"--launcher ssh takes no arguments of an MPI: {' '.join(plan.mpi_args)}",
                hint="ssh's own options belong in ~/.ssh/config; --launcher mpirun takes --mpi-args",
            )
        python = plan.program.interpreter
        argv = [python, "-I", "-S", installation.spawner, installation.ssh, HOSTS]
        argv.append(str(plan.settings.output.stdin))
        for name in plan.forward:
            argv += ["-x", name]
        argv += ["--", *agent_argv(plan, installation)]
        shared = {name: value for name, value in plan.env.items() if name not in plan.private}
        lines = (
            f"{host.host} {len(host.ranks)}{' here' if host.host in plan.here else ''}\n"
            for host in plan.hosts
        )
        command = Command(
            tuple(argv),
            {**shared, **placement_variables(plan, self)},
            {HOSTS: "".join(lines)},
            when_orphaned=signal.SIGTERM,
        )
        return (command,)

    def start_failure(self, text: str, *, ended: bool = False) -> StartFailure | None:
        for line in text.splitlines():
            if line.startswith(_FAILED):
                with contextlib.suppress(ValueError, TypeError, KeyError):  # cut off, or a program's line
                    said = json.loads(line.removeprefix(_FAILED))
                    return StartFailure(str(said["host"]), _CONNECTING.sub("", str(said["why"])))
        return None


SSH = Ssh()
