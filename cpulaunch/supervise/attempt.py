"""One attempt of a job: what differs each time that a plan is started."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cpulaunch import launchers, variables
from cpulaunch.errors import HostError
from cpulaunch.launchers.command import Command
from cpulaunch.plan.plan import Plan
from cpulaunch.supervise.start import Starter, allow_files, listen

if TYPE_CHECKING:
    from cpulaunch.supervise.output import Console


JOB_ID_BYTES = 8
"""Random ones in a job's id: two jobs of one second must share neither a directory nor a sweep."""


class Attempt(NamedTuple):
    """One start of a plan.

    ``job_id`` is that of the whole job and marks its processes; ``token`` is this attempt's secret, and
    ``master_port`` where its ranks' Store listens.
    """

    plan: Plan
    commands: Sequence[Command]
    job_id: str
    token: str
    master_port: int
    restart_count: int = 0

    def variables(self, control: str) -> Mapping[str, str]:
        """What the agents have to know of it; ``control`` is the launcher's address."""
        return {
            variables.CONTROL: control,
            variables.JOB_ID: self.job_id,
            variables.LAUNCHER_PID: str(os.getpid()),
            variables.RESTART_COUNT: str(self.restart_count),
            variables.TOKEN: self.token,
            "MASTER_PORT": str(self.master_port),
        }


def first_attempt(plan: Plan, commands: Sequence[Command], free_port: int | None = None) -> Attempt:
    """A new job.  HostError where the port that was asked for is in use here.

    ``free_port`` is free on the first host; without one, a port that is free here has to do.
    """
    identity = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(JOB_ID_BYTES)
    return Attempt(plan, commands, identity, _new_token(), _master_port(plan, free_port))


def next_attempt(previous: Attempt, free_port: int | None = None) -> Attempt:
    """The same plan once more.  Nothing that the previous attempt may have left can be taken for it."""
    return previous._replace(
        token=_new_token(),
        master_port=_master_port(previous.plan, free_port),
        restart_count=previous.restart_count + 1,
    )


class RunningAttempt(NamedTuple):
    """An attempt whose first processes run, and which listens for its agents."""

    attempt: Attempt
    listener: socket.socket
    starter: Starter


def start_attempt(attempt: Attempt, console: Console) -> RunningAttempt:
    """Start the first commands of an attempt in the job's directory.  Raises HostError."""
    plan = attempt.plan
    allow_files(plan.world_size)
    listener, address = listen(plan)
    try:
        agents = launchers.load(plan.launcher).agents_are_children
        starter = Starter(attempt.commands, attempt.variables(address), console.directory, agents=agents)
        starter.start_first()
    except BaseException:
        listener.close()
        raise
    return RunningAttempt(attempt, listener, starter)


def _new_token() -> str:
    return secrets.token_hex(16)


def _master_port(plan: Plan, free_port: int | None) -> int:
    wanted = plan.setting("hosts.master_port")
    if wanted == "auto":
        return free_port or _bind("", 0)
    port = int(wanted)
    if plan.here_alone:
        try:
            _bind(plan.master_addr, port)
        except OSError as e:
            raise HostError(
                f"port {port} of {plan.master_addr}: {e.strerror or e}",
                hint="--master-port auto takes a free one",
            ) from None
    return port


def _bind(address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((address, port))
        number: int = s.getsockname()[1]
        return number
