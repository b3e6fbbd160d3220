"""What differs each time that a plan is started."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from cpulaunch import variables
from cpulaunch.errors import HostError
from cpulaunch.plan.plan import Plan


@dataclass(frozen=True)
class Job:
    """One start of a plan.  ``token`` is secret; ``master_port`` is where the ranks' Store listens."""

    id: str
    token: str
    master_port: int
    restart_count: int = 0

    def variables(self, control: str) -> Mapping[str, str]:
        """What the agents have to know of it; ``control`` is the launcher's address."""
        return {
            variables.CONTROL: control,
            variables.JOB_ID: self.id,
            variables.LAUNCHER_PID: str(os.getpid()),
            variables.RESTART_COUNT: str(self.restart_count),
            variables.TOKEN: self.token,
            "MASTER_PORT": str(self.master_port),
        }


def new_job(plan: Plan, free_port: int | None = None) -> Job:
    """A new start of ``plan``.  HostError where the port that was asked for is in use here.

    ``free_port`` is free on the first host; without one, a port that is free here has to do.
    """
    said = plan.setting("hosts.master_port")
    port = _checked(plan, said) if said != "auto" else free_port or _free_port()
    identity = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
    return Job(identity, secrets.token_hex(16), port)


def _checked(plan: Plan, port: int) -> int:
    if plan.here_alone:
        try:
            _bind(plan.master_addr, port)
        except OSError as e:
            raise HostError(
                f"port {port} of {plan.master_addr}: {e.strerror or e}",
                hint="--master-port auto takes a free one",
            ) from None
    return port


def _free_port() -> int:
    return _bind("", 0)


def _bind(address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((address, port))
        number: int = s.getsockname()[1]
        return number
