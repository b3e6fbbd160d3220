"""The interface of launchers.  The rest of cpulaunch uses it, and knows no launcher by name."""

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
    """A host on which a start failed, and the reason in the words of ssh or the launcher."""

    host: str
    why: str


class Launcher(ABC):
    """Starts one agent for each rank of a plan, all with the same command line.

    An agent can't import its launcher, as it runs without installed packages (``python -I -S``).  So it gets
    the attributes that it needs as data: ``identity``, ``agents_are_children`` and ``daemon_outlives_link``.
    """

    name: str
    """Its name in plans and settings."""

    title: str
    """Its name in messages."""

    identity: IdentityVariables
    """The variables by which it passes rank, size, local rank and local size to a process."""

    stop_signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)
    """The signals that its processes are sent in turn until they end."""

    exit_patience = 5.0
    """Seconds that its processes have to end by themselves after the last rank has ended."""

    reach: Reach = NoReach()
    """The way to run a command on a host, in order to probe or to sweep it."""

    noise: tuple[str, ...] = ()
    """Prefixes of lines of its output that are of no use to the user, and go only into the log."""

    agents_are_children = False
    """Whether each command is one agent, in the order of ranks, so that it ends when that agent ends."""

    daemon_outlives_link = False
    """Whether an agent that has lost the launcher's host must end its parent, which would never end
    otherwise."""

    ranks_outlive_it = False
    """Whether the ranks go on when its process is killed, as those of a Slurm step do."""

    ends_with_network = False
    """Whether its process may end because the network was cut, while the ranks go on."""

    left_out: tuple[str, ...] = ()
    """The user's variables that are removed from its environment.

    They pin or place ranks, which is cpulaunch's task, or choose another program to start them.
    """

    passes_environment = True
    """Whether remote processes inherit the environment of its command."""

    is_intel_mpi = False
    """Whether the ranks can use Intel MPI, which oneCCL's transport ``mpi`` needs."""

    this_host_only = False
    """Whether it starts ranks only on the launching host."""

    @property
    def users_variables(self) -> tuple[str, ...]:
        """Variables for its own programs that it sets only if the user hasn't set them."""
        return ()

    @abstractmethod
    def commands(self, plan: Plan, installation: Installation) -> tuple[Command, ...]:
        """The commands to start for ``plan``.  No I/O: the same arguments give the same commands.

        Raises PlanError if this launcher can't start the plan.
        """

    def start_failure(self, text: str, *, ended: bool = False) -> StartFailure | None:
        """The failed start that ``text`` reports, or None.  ``text`` is the output of its processes.

        ``ended`` says that the output is complete.
        """
        return None

    def cancellation(self, text: str) -> str:
        """Why a batch system has ended all ranks, according to the output of its processes; else empty."""
        return ""

    def lost_hosts(self, text: str) -> tuple[str, ...]:
        """The hosts that have failed according to the output of its processes."""
        return ()
