"""The launcher ssh: agents on several hosts, without any MPI.

Its single command is a spawner (``agent/spawner``).  The spawner starts the agents of this host, and uses ssh
to start a spawner on each other host.  The environment is sent through ssh's stdin, because every user can
read arguments with ``ps``.
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
"""The name of the hosts file.  Each line has a name, a number of ranks, and ``here`` for this host."""

_FAILED = "cpulaunch: ssh: "
"""The prefix of the spawner's line about a host without agents, before JSON."""

_CONNECTING = re.compile(r"^connect to host \S+ port \d+: ")
"""The beginning of ssh's message, before the reason."""


class Ssh(Launcher):
    name = "ssh"
    title = "ssh"
    identity = IdentityVariables(*variables.LOCAL_IDENTITY)
    # After the first signal, the spawner asks all agents to end; after the second, it kills them.
    stop_signals = (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
    reach = SshReach()
    noise = (_FAILED,)
    ranks_outlive_it = ends_with_network = True
    exit_patience = 0.5  # the spawner waits for hosts whose connection is lost

    def commands(self, plan: Plan, installation: Installation) -> tuple[Command, ...]:
        """Return the single command of ``plan``.  Raises PlanError if it has arguments for an MPI."""
        if plan.mpi_args:
            raise PlanError(
                f"--launcher ssh accepts no --mpi-args: {' '.join(plan.mpi_args)}",
                hint="put options of ssh into ~/.ssh/config, or use --launcher mpirun",
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
                with contextlib.suppress(ValueError, TypeError, KeyError):  # incomplete or a program's
                    report = json.loads(line.removeprefix(_FAILED))
                    return StartFailure(str(report["host"]), _CONNECTING.sub("", str(report["why"])))
        return None


SSH = Ssh()
