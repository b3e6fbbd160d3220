"""Decide whether srun can start a job's ranks as a step of the current Slurm allocation."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable, Sequence
from shutil import which

from cpulaunch.config.config import Config
from cpulaunch.discovery.batch.allocation import allocated_nodes, cpus_of_nodes, nodes_for_steps
from cpulaunch.discovery.batch.slurm_job import scontrol_show
from cpulaunch.errors import ConfigError
from cpulaunch.model.hosts import Host, fold_hosts
from cpulaunch.plan.select import decide_launcher, leaves_launcher_to_us

NAME = "slurm"
"""The value of the setting ``launcher`` for srun."""


def part_of_nodes(config: Config, hosts: Sequence[Host]) -> str:
    """A sentence about a node on which the Slurm job has only some of the CPUs; empty if there is none.

    Slurm confines a step to the job's CPUs.  Ranks started over ssh could also use CPUs of other jobs.
    """
    given = cpus_of_nodes(config.environ)
    named = [host.name for host in hosts if host.name in given]
    if not named or (done := scontrol_show("node", ",".join(named))) is None:
        return ""
    for line in done.stdout.splitlines():
        words = dict(word.partition("=")[::2] for word in line.split())
        name, total = words.get("NodeName", ""), words.get("CPUEfctv") or words.get("CPUTot", "")
        if name in given and total.isdecimal() and given[name] < int(total):
            return f"Slurm has given this job {given[name]} of the {total} CPUs of {name}"
    return ""


def can_start(config: Config, hosts: Sequence[Host]) -> bool:
    """Whether the user has not chosen a launcher, and a step can start ranks on ``hosts``."""
    if not leaves_launcher_to_us(config):
        return False
    return bool(hosts) and _outside_allocation(config, hosts) == [] and which("srun") is not None


def demand_inside(config: Config, hosts: Sequence[Host], here: Collection[str]) -> None:
    """Raise ConfigError if some of ``hosts`` are outside of the current Slurm job.

    They may belong to other jobs, but ssh would start ranks there.  ``here`` are the names of this host.
    """
    nodes = allocated_nodes(config.environ)
    if not nodes or decide_launcher(config, here_alone=False).launcher.this_host_only:
        return
    ours = nodes | {name.partition(".")[0] for name in nodes} | (set(here) if nodes & set(here) else set())
    outside = [host.name for host in hosts if not {host.name, host.name.partition(".")[0]} & ours]
    if any(map(_is_address, outside)):
        addresses = {address for node in sorted(nodes) for address in addresses_of(node)}
        outside = [name for name in outside if name not in addresses]
    if outside:
        where = config.where(Config.hosts.hostfile if config.hosts.hostfile else Config.hosts.list)
        job = config.environ.get("SLURM_JOB_ID", "?")
        raise ConfigError(
            f"{where}: {fold_hosts(outside)} {'is' if len(outside) == 1 else 'are'} not among the nodes of "
            f"Slurm job {job}, which are {fold_hosts(sorted(nodes))}",
            hint="omit --hosts and --hostfile to use the job's nodes; sbatch --nodelist=… requests other "
            "nodes; `env -u SLURM_JOB_NODELIST cpulaunch run …` ignores the job",
            part=outside[0],
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def addresses_of(node: str) -> set[str]:
    """The addresses to which this host resolves the name; empty if unknown."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(node, None)}
    except (OSError, UnicodeError):
        return set()


def demand_step(config: Config, hosts: Sequence[Host]) -> None:
    """Raise ConfigError if the user has chosen srun, and it can't start a step on ``hosts``."""
    if config.launcher != NAME:
        return
    where = config.where(Config.launcher)
    outside = _outside_allocation(config, hosts)
    if outside is None:
        raise ConfigError(
            f"{where}: srun needs an allocation, but there is none",
            hint="use `salloc --nodes=2 --exclusive cpulaunch run …` or `cpulaunch submit --nodes 2 …`",
        )
    if outside:  # for example, nodes of another component
        raise ConfigError(
            f"{where}: {fold_hosts(outside)} {'is' if len(outside) == 1 else 'are'} not in the allocation",
            hint="omit --hosts and --hostfile to use the allocation's nodes",
            part=outside[0],
        )
    if which("srun") is None:
        raise ConfigError(f"{where}: srun is not on PATH", hint="install Slurm's package slurm-client")


def _outside_allocation(config: Config, hosts: Iterable[Host]) -> list[str] | None:
    """The names of ``hosts`` outside of the Slurm allocation; None outside of an allocation."""
    nodes = nodes_for_steps(config.environ)
    if nodes is None:
        return None
    names = {host.name for host in nodes}
    return [host.name for host in hosts if host.name not in names]
