"""Ask Slurm about the current job: whether it still runs, and its CPUs on this host.

A shell keeps the variables of a job that has ended, and salloc's shell may use all CPUs of its node.
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

_STATES_WITH_NODES = ("RUNNING", "SUSPENDED", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")
"""States in which a job has its nodes (squeue(1), JOB STATE CODES)."""

_UNKNOWN = "Invalid job id specified"
_CPUS = re.compile(r" Nodes=(\S+) CPU_IDs=(\S+)")


class SlurmJob(NamedTuple):
    """A Slurm job."""

    number: str
    state: str  # as Slurm names it
    cpus: Mapping[str, CoreSet] = {}  # by node, in Slurm's numbering

    @property
    def has_nodes(self) -> bool:
        return self.state in _STATES_WITH_NODES


def slurm_job(environ: Mapping[str, str]) -> SlurmJob | None:
    """The current job according to ``environ``; None if there is no job, or if Slurm doesn't answer."""
    number = environ.get("SLURM_JOB_ID", "")
    if not number or not any(name.startswith("SLURM_JOB_NODELIST") for name in environ):
        return None
    done = scontrol_show("job", "--details", number)
    if done is None:
        return None
    if _UNKNOWN in done.stderr:
        return SlurmJob(number, "no job that Slurm knows")
    return _parse(number, done.stdout)


def scontrol_show(*what: str) -> subprocess.CompletedProcess[str] | None:
    """Run ``scontrol show --oneliner WHAT…``; None if Slurm doesn't answer."""
    try:
        return subprocess.run(
            ["scontrol", "show", "--oneliner", *what],
            capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None


def _parse(number: str, text: str) -> SlurmJob | None:
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
    """Warn and remove Slurm's variables if ``job`` no longer has nodes."""
    if job is None or job.has_nodes:
        return config
    tell(f"warning: $SLURM_JOB_ID={job.number} is {job.state}: the job no longer has its nodes")
    environ = {name: value for name, value in config.environ.items() if not name.startswith("SLURM_")}
    return replace(config, environ=environ)


def restricted_to_job(topology: Topology, job: SlurmJob | None, names: Collection[str]) -> Topology:
    """Restrict this host's ``topology`` to the CPUs of ``job``.  ``names`` are the names of this host.

    Slurm numbers all CPUs of the machine by socket, then core.  If this process may use only some of them,
    the numbers can't be translated, and ``topology`` is returned unchanged.
    """
    job_cpus = next((cpus for node, cpus in job.cpus.items() if node in names), None) if job else None
    if job is None or job_cpus is None or len(topology.cpus) < (os.cpu_count() or 0):
        return topology
    order = [each.cpu for each in sorted(topology.cpus, key=lambda cpu: (cpu.socket, cpu.core, cpu.cpu))]
    if not job_cpus <= CoreSet(range(len(order))):
        note = (
            f"Slurm job {job.number} has CPUs {job_cpus} in Slurm's numbering, but this host has fewer CPUs"
        )
        return replace(topology, notes=(*topology.notes, note))
    allowed = CoreSet(order[number] for number in job_cpus)
    if len(allowed) == len(order):
        return topology
    note = f"{len(allowed)} of {len(order)} CPUs belong to Slurm job {job.number}"
    return replace(topology.restricted(allowed), notes=(*topology.notes, note))
