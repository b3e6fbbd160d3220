"""The interface of launchers."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from cpulaunch.launchers.command import Command
from cpulaunch.launchers.reach import NoReach, Reach
from cpulaunch.plan.placement import IdentityVariables

if TYPE_CHECKING:
    from cpulaunch.launchers.command import Installation
    from cpulaunch.plan.plan import Plan


class StartFailure(NamedTuple):
    """A host where a start failed, and the reason as ssh or the launcher words it."""

    host: str
    why: str


class Launcher(ABC):
    """Starts one agent for each rank of a plan, all with the same command line.

    An agent can't import its launcher, as it runs without installed packages (``python -I -S``).  Therefore
    ``identity``, ``agents_are_children`` and ``daemon_outlives_link`` are passed to agents as data.
    """

    name: str
    """Its name in plans and settings."""

    title: str
    """Its name in messages."""

    identity: IdentityVariables
    """The variables in which it passes rank, size, local rank and local size to a process."""

    stop_signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)
    """The signals to send to its processes, one after the other, until they end."""

    exit_patience = 5.0
    """Seconds that its processes get to exit after the last rank has ended."""

    reach: Reach = NoReach()
    """Runs commands on hosts, to probe them or to kill leftover processes."""

    noise: tuple[str, ...] = ()
    """Prefixes of output lines that users don't need.  These lines go only into the log."""

    agents_are_children = False
    """Whether each command starts one agent and ends with it.  The commands are in the order of ranks."""

    daemon_outlives_link = False
    """Whether the agents' parent never ends when the launcher's host is lost, so that agents must end it."""

    ranks_outlive_it = False
    """Whether the ranks continue when its process is killed, as in a Slurm step."""

    ends_with_network = False
    """Whether its process may end due to a lost network while the ranks continue."""

    left_out: tuple[str, ...] = ()
    """Variables of the user that are removed from its environment.

    They would pin or place ranks, or select another program to start them.
    """

    passes_environment = True
    """Whether remote processes inherit its environment."""

    is_intel_mpi = False
    """Whether the ranks can use Intel MPI, which oneCCL's transport ``mpi`` needs."""

    this_host_only = False
    """Whether it starts ranks only on the launching host."""

    @property
    def users_variables(self) -> tuple[str, ...]:
        """Variables that it sets for its own programs unless the user has set them."""
        return ()

    @abstractmethod
    def commands(self, plan: Plan, installation: Installation) -> tuple[Command, ...]:
        """Return the commands that start ``plan``.  No I/O.  Raises PlanError if it can't be started."""

    def start_failure(self, text: str, *, ended: bool = False) -> StartFailure | None:
        """Find a failed start in ``text``, the output of its processes.  ``ended``: ``text`` is complete."""
        return None

    def cancellation(self, text: str) -> str:
        """Find in the output of its processes why a batch system has ended the job; empty if it hasn't."""
        return ""

    def lost_hosts(self, text: str) -> tuple[str, ...]:
        """Find failed hosts in the output of its processes."""
        return ()
