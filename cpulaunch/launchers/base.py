"""What every launcher says of itself.  The rest of cpulaunch asks this, and knows no launcher by name."""

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
    """A host on which something could not be started, and why, in the words of ssh or the launcher."""

    host: str
    why: str


class Launcher(ABC):
    """Starts one agent for each rank of a plan, all by the same command line.

    The agents of third-party launchers run without installed packages (``python -I -S``), so what an agent
    must know of its launcher is data, which travels to it: ``identity``, ``agents_are_children`` and
    ``daemon_outlives_link``.
    """

    name: str
    """What a plan calls it."""

    title: str
    """What people call it."""

    identity: IdentityVariables
    """The variables by which it tells a process who it is."""

    stop_signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)
    """What its processes are sent in turn until they end."""

    reach: Reach = NoReach()
    """How a command is run on one of the hosts, to ask it or to sweep it."""

    noise: tuple[str, ...] = ()
    """How lines of its output begin that are of no use to anybody, and go into the log only."""

    agents_are_children = False
    """Whether each command is one agent, in the order of ranks, so that its end is that agent's end."""

    daemon_outlives_link = False
    """Whether an agent that is cut off must end its parent, which would wait for its launcher for ever."""

    ranks_outlive_it = False
    """Whether the ranks go on when its process is killed, as a step of Slurm does."""

    left_out: tuple[str, ...] = ()
    """The user's variables that it doesn't get: they pin or place ranks, which cpulaunch does, or have
    another program start them."""

    passes_environment = True
    """Whether remote processes get the environment that its command has."""

    is_intel_mpi = False
    """Whether the ranks can use Intel MPI, which oneCCL's transport ``mpi`` sends through."""

    this_host_only = False
    """Whether it starts ranks on the launching host only."""

    @property
    def users_variables(self) -> tuple[str, ...]:
        """Variables for its own programs that it sets only where the user hasn't."""
        return ()

    @abstractmethod
    def commands(self, plan: Plan, installation: Installation) -> tuple[Command, ...]:
        """What to start for ``plan``.  Pure: the same arguments give the same commands."""

    def start_failure(self, text: str, *, ended: bool = False) -> StartFailure | None:
        """The failed start that ``text``, the output of its processes, tells of.

        ``ended``: nothing more will be said.
        """
        return None

    def cancellation(self, text: str) -> str:
        """Why a batch system has ended all ranks, where the output of its processes tells; else empty."""
        return ""

    def lost_hosts(self, text: str) -> tuple[str, ...]:
        """Hosts that have failed, by the output of its processes."""
        return ()
