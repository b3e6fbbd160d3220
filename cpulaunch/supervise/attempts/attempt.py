"""One attempt of a job: the values that differ for each start of a plan."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cpulaunch import launchers, variables
from cpulaunch.discovery.host import master_port
from cpulaunch.errors import HostError
from cpulaunch.launchers.command import Command
from cpulaunch.plan.plan import Plan
from cpulaunch.supervise.attempts.start import Starter, allow_files, listen
from cpulaunch.wire import groups_key
from cpulaunch.wording import PORT_IS_TAKEN

if TYPE_CHECKING:
    from cpulaunch.supervise.output.lines import Console


ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end a job, besides SIGINT: users can configure a batch system to send any of them."""

JOB_ID_BYTES = 8
"""Random bytes in a job's id, so that jobs of the same second have different ids."""

TOKEN_BYTES = 16


class Attempt(NamedTuple):
    """One start of a plan.

    ``job_id`` identifies the whole job and marks its processes.  ``token`` is this attempt's secret.
    ``master_port`` is the port of the ranks' Store.  ``port_keeper`` reserves that port if it is on this host
    and the first rank's agent takes it over (`agent.program.master_port`).
    """

    plan: Plan
    commands: Sequence[Command]
    job_id: str
    token: str
    master_port: int
    restart_count: int = 0
    port_keeper: socket.socket | None = None

    def variables(self, control: str) -> Mapping[str, str]:
        """Return the environment variables for the agents; ``control`` is the launcher's address."""
        env = {
            variables.CONTROL: control,
            variables.JOB_ID: self.job_id,
            variables.LAUNCHER_PID: str(os.getpid()),
            variables.RESTART_COUNT: str(self.restart_count),
            variables.MAX_RESTARTS: str(self.plan.settings.watch.max_restarts),
            variables.TOKEN: self.token,
            variables.GROUPS_KEY: groups_key(self.token),
            "MASTER_PORT": str(self.master_port),
        }
        if self.port_keeper is not None:
            env[variables.KEPT_PORT] = str(self.master_port)
        return env

    def release_port(self) -> None:
        """Release the port: the first rank's agent reserves it now, or nobody needs it."""
        if self.port_keeper is not None:
            self.port_keeper.close()


def first_attempt(plan: Plan, commands: Sequence[Command], free_port: int | None = None) -> Attempt:
    """Make the first attempt of a new job.

    ``free_port`` is a free port on the first host; without it, a port that is free here is used.  Raises
    HostError if the requested port is in use here.
    """
    identity = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(JOB_ID_BYTES)
    port, keeper = _master_port(plan, free_port)
    return Attempt(plan, commands, identity, secrets.token_hex(TOKEN_BYTES), port, port_keeper=keeper)


def next_attempt(
    previous: Attempt, plan: Plan, commands: Sequence[Command], free_port: int | None = None
) -> Attempt:
    """Make the attempt that follows ``previous``.

    Its token is new, so that processes left of the previous attempt can't take part in it.  Raises HostError
    if the requested port is in use here.
    """
    port, keeper = _master_port(plan, free_port)
    return previous._replace(
        plan=plan,
        commands=commands,
        token=secrets.token_hex(TOKEN_BYTES),
        master_port=port,
        restart_count=previous.restart_count + 1,
        port_keeper=keeper,
    )


class RunningAttempt(NamedTuple):
    """An attempt whose first processes run.  It listens for its agents at ``address``.

    ``early_signals`` gets the first signal that arrives before the loop handles signals.
    """

    attempt: Attempt
    listener: socket.socket
    address: str
    starter: Starter
    early_signals: list[int]


def start_attempt(attempt: Attempt, console: Console) -> RunningAttempt:
    """Start the first commands of an attempt in the job's directory.  Raises HostError."""
    plan = attempt.plan
    allow_files(plan)
    listener, address = listen(plan)
    try:
        agents = launchers.load(plan.launcher).agents_are_children
        reader = plan.settings.output.stdin if agents else 0
        env = attempt.variables(address)
        starter = Starter(attempt.commands, env, console.directory, agents=agents, stdin=reader)
        early_signals = _keep_for_the_loop()
        starter.start_first()
    except BaseException:
        listener.close()
        attempt.release_port()
        raise
    return RunningAttempt(attempt, listener, address, starter, early_signals)


def let_signals_raise() -> None:
    """Let signals raise SystemExit while no loop handles them, so that the clean-up code runs."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    _handle(leave)


def _keep_for_the_loop() -> list[int]:
    """Keep the first signal for the loop, so that ranks that already run can save their state.

    Returns the list to which the signal is added.  A second signal raises SystemExit.
    """
    kept: list[int] = []

    def keep(number: int, frame: object) -> None:
        if kept:
            raise SystemExit(128 + number)
        kept.append(number)

    _handle(keep)
    return kept


def _handle(handler: Callable[[int, object], None]) -> None:
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _master_port(plan: Plan, free_port: int | None) -> tuple[int, socket.socket | None]:
    """Return the port, and the socket that reserves it, if it is on this host.  Raises HostError."""
    wanted = plan.settings.hosts.master_port
    if not plan.here_alone and (port := free_port if wanted == "auto" else wanted):
        return port, None
    ours = os.environ.get(variables.KEPT_PORT)
    ports = master_port.candidates(wanted, plan.settings.hosts.ports)
    try:
        keeper = master_port.first_free(ports, lambda port: master_port.keep(port, ours))
    except OSError as e:
        which = f"port {wanted}" if wanted != "auto" else f"ports {plan.settings.hosts.port_range}"
        raise HostError(f"{which} of {plan.master_addr}: {e.strerror or e}", hint=PORT_IS_TAKEN) from None
    port = keeper.getsockname()[1]
    taken_over = plan.here_alone and plan.program.python and not plan.instances
    if taken_over and not plan.settings.training.as_written:
        return port, keeper
    keeper.close()  # no agent takes it over
    return port, None
