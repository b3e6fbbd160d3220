"""Whether srun can start a job's ranks: as a step of the Slurm allocation that we are in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from shutil import which

from cpulaunch.config.config import Config
from cpulaunch.discovery.allocation import nodes_for_steps
from cpulaunch.discovery.preflight import Report
from cpulaunch.errors import ConfigError
from cpulaunch.model.hosts import Host
from cpulaunch.wording import shortened

NAME = "slurm"
"""What the setting calls this launcher."""


def why_instead_of_ssh(config: Config, hosts: Sequence[Host], reports: Iterable[Report]) -> str:
    """Why a step has to start the ranks, where the user leaves that to us and ssh leads nowhere; else empty.

    ``reports`` are those on the hosts that were asked over ssh.
    """
    obstacles = [report.problems[0] for report in reports if report.unreached]
    if not obstacles or not can_start(config, hosts):
        return ""
    return f"ssh doesn't reach the allocation's nodes ({obstacles[0].what.removeprefix('ssh: ')})"


def can_start(config: Config, hosts: Sequence[Host]) -> bool:
    """Whether the user leaves the launcher to us, and a step can start ranks on ``hosts``."""
    if config["launcher"] != "auto" or config["mpi.flavour"] != "auto" or config["mpi.path"] != "auto":
        return False
    return bool(hosts) and _which_not(config, hosts) == [] and which("srun") is not None


def demand_allocation(config: Config, hosts: Sequence[Host]) -> None:
    """ConfigError where the user wants a step, and there can be none on ``hosts``."""
    if config["launcher"] != NAME:
        return
    where = config.where("launcher")
    outside = _which_not(config, hosts)
    if outside is None:
        raise ConfigError(
            f"{where}: srun starts ranks in an allocation, and this is none",
            hint="salloc --nodes=2 --exclusive cpulaunch run …, or the same in an sbatch script",
        )
    if outside:
        raise ConfigError(
            f"{where}: {shortened(outside)} {'is' if len(outside) == 1 else 'are'} not in the allocation",
            hint="without --hosts and --hostfile, the allocation's nodes are taken",
            part=outside[0],
        )
    if which("srun") is None:
        raise ConfigError(f"{where}: there is no srun on PATH", hint="Slurm's package slurm-client has it")


def _which_not(config: Config, hosts: Iterable[Host]) -> list[str] | None:
    """Those of ``hosts`` that aren't in the Slurm allocation; None where there is no such allocation."""
    nodes = nodes_for_steps(config.environ)
    if nodes is None:
        return None
    names = {host.name for host in nodes}
    return [host.name for host in hosts if host.name not in names]
