"""Ask Slurm about the job that the environment names: whether it still runs, and its CPUs on this host.

Both are needed because a shell keeps the variables of a job that has ended, and because a shell of salloc may
use all CPUs of its node.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from cpulaunch.config.config import Config
from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.hosts import parse_hosts
from cpulaunch.model.topology import Topology

TIMEOUT = 10.0
"""Seconds within which scontrol must answer."""

_THERE = ("RUNNING", "SUSPENDED", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")
"""States of a job that has its nodes (squeue(1), JOB STATE CODES)."""

_UNKNOWN = "Invalid job id specified"
_CPUS = re.compile(r" Nodes=(\S+) CPU_IDs=(\S+)")


class SlurmJob(NamedTuple):
    """A Slurm job.  ``state`` is Slurm's word; ``cpus`` are the job's CPUs by node, in Slurm's numbering."""

    number: str
    state: str
    cpus: Mapping[str, CoreSet] = {}

    @property
    def has_nodes(self) -> bool:
        return self.state in _THERE


def slurm_job(environ: Mapping[str, str]) -> SlurmJob | None:
    """The job that ``environ`` names.  None if it names no job, or if Slurm doesn't answer."""
    number = environ.get("SLURM_JOB_ID", "")
    if not number or not any(name.startswith("SLURM_JOB_NODELIST") for name in environ):
        return None
    done = scontrol_show("job", "--details", number)
    if done is None:
        return None
    if _UNKNOWN in done.stderr:
        return SlurmJob(number, "no job that Slurm knows")
    return _parsed(number, done.stdout)


def scontrol_show(*what: str) -> subprocess.CompletedProcess[str] | None:
    """Run ``scontrol show --oneliner`` on an entity.  None if Slurm doesn't answer."""
    try:
        return subprocess.run(
            ["scontrol", "show", "--oneliner", *what],
            capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None


def _parsed(number: str, text: str) -> SlurmJob | None:
    state = re.search(r"\bJobState=(\w+)", text)
    if not state:
        return None
    cpus: dict[str, CoreSet] = {}
    try:
        for nodes, numbers in _CPUS.findall(text):
            for host in parse_hosts(nodes, "scontrol"):
                cpus[host.name] = CoreSet.parse(numbers)
    except ConfigError:
        cpus = {}
    return SlurmJob(number, state[1], cpus)


def without_ended_job(config: Config, job: SlurmJob | None, tell: Callable[[str], None]) -> Config:
    """Remove Slurm's variables, with a warning to ``tell``, if ``job`` has no nodes any more."""
    if job is None or job.has_nodes:
        return config
    tell(f"warning: $SLURM_JOB_ID={job.number} is {job.state}: its nodes are not the job's any more")
    kept = {name: value for name, value in config.environ.items() if not name.startswith("SLURM_")}
    return replace(config, environ=kept)


def restricted_to_job(topology: Topology, job: SlurmJob | None, names: Collection[str]) -> Topology:
    """Restrict this host's ``topology`` to the CPUs that Slurm has given to ``job``.

    Slurm numbers the CPUs of the whole machine by socket, then core.  So ``topology`` is returned unchanged
    if this process may use only a part of the machine.  ``names`` are the names of this host.
    """
    given = next((cpus for node, cpus in job.cpus.items() if node in names), None) if job else None
    if job is None or given is None or len(topology.cpus) < (os.cpu_count() or 0):
        return topology
    order = [each.cpu for each in sorted(topology.cpus, key=lambda cpu: (cpu.socket, cpu.core, cpu.cpu))]
    if not given <= CoreSet(range(len(order))):
        note = f"Slurm job {job.number} has CPUs {given} in Slurm's numbering, which this host lacks"
        return replace(topology, notes=(*topology.notes, note))
    ours = CoreSet(order[number] for number in given)
    if len(ours) == len(order):
        return topology
    note = f"{len(ours)} of {len(order)} CPUs are those of Slurm job {job.number}"
    return replace(topology.restricted(ours), notes=(*topology.notes, note))
