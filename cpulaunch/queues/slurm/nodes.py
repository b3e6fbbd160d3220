"""Run Slurm's programs, and find out which nodes a job would get."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from subprocess import CompletedProcess
from typing import NamedTuple

from cpulaunch.errors import HostError, UsageError
from cpulaunch.model.facts import HostFacts
from cpulaunch.model.topology import Cpu, Topology
from cpulaunch.queues.base import call
from cpulaunch.queues.slurm.options import number
from cpulaunch.wording import counted


def ask_slurm(argv: Sequence[str]) -> str:
    """Run a program of Slurm, and return its stdout.  Raises HostError with its last message if it fails."""
    done = call(argv)
    if done.returncode:
        done.stderr = done.stderr.rstrip().rpartition("\n")[2]  # lines before it name Slurm's functions
        raise failure(argv[0], done)
    return done.stdout


def failure(program: str, done: CompletedProcess[str]) -> HostError:
    """The error for a failed program of Slurm, with the program's messages."""
    lines = re.findall(rf"(?:{program}: )?(?:error|fatal): (.+)", done.stderr) or done.stderr.split("\n")
    return HostError(f"{program}: {'; '.join(filter(None, lines)) or f'exit code {done.returncode}'}")


# Partition, sockets, cores per socket, threads per core, MB, number of nodes, features.
_FORMAT = "%P|%X|%Y|%Z|%m|%D|%f"


class PartitionNodes(NamedTuple):
    """Equal nodes of a partition."""

    partition: str
    sockets: int
    cores: int  # per socket
    threads: int  # per core
    memory: int  # bytes
    number: int  # of nodes
    features: frozenset[str]

    @property
    def cpus(self) -> int:
        return self.sockets * self.cores * self.threads

    def __str__(self) -> str:
        parts = (
            counted(self.sockets, "socket"),
            counted(self.cores, "core"),
            counted(self.threads, "thread"),
        )
        return f"partition {self.partition} ({' × '.join(parts)}, {self.memory / 2**30:.0f} GiB)"


def nodes_of_partition(options: Mapping[str, str]) -> PartitionNodes:
    """The most frequent kind of nodes that sbatch's ``options`` select.

    Raises HostError if sinfo fails or lists no such node, and UsageError if the partition is too small.
    """
    chosen = [f"--partition={options['--partition']}"] if "--partition" in options else []
    chosen += [f"--nodes={options['--nodelist']}"] if "--nodelist" in options else []
    if "--clusters" in options:
        chosen.append(f"--clusters={options['--clusters']}")
    text = ask_slurm(["sinfo", "--noheader", "--exact", f"--format={_FORMAT}", *chosen])
    if "--clusters" not in options:
        demand_room(text, options)
    return most_nodes(text, options)


def demand_room(text: str, options: Mapping[str, str]) -> None:
    """Raise UsageError if sbatch's ``options`` request more than any partition in sinfo's ``text`` has.

    Unless the site sets EnforcePartLimits (slurm.conf), Slurm accepts such a job, but never starts it.
    """
    partitions: dict[str, list[PartitionNodes]] = {}
    for kind in _kinds(text):
        if "--partition" in options or kind.partition.endswith("*"):
            partitions.setdefault(kind.partition.removesuffix("*"), []).append(kind)
    largest_first = sorted(partitions.items(), key=lambda item: -sum(kind.number for kind in item[1]))
    shortages = [_shortage(name, kinds, options) for name, kinds in largest_first]
    if shortages and all(shortages):
        raise next(filter(None, shortages))


def _shortage(name: str, kinds: Sequence[PartitionNodes], options: Mapping[str, str]) -> UsageError | None:
    """The error if the partition ``name``, with nodes of these ``kinds``, is too small, else None."""
    most, nodes = sum(kind.number for kind in kinds), number(options, "--nodes")
    if nodes > most and "--nodelist" not in options:
        return UsageError(
            f"--nodes={options['--nodes']}: partition {name} has {counted(most, 'node')}",
            hint=f"use at most --nodes={most}, or another --partition, which `sinfo` lists",
        )
    largest = max(kind.cpus for kind in kinds)
    each, tasks = number(options, "--cpus-per-task") or 1, number(options, "--ntasks-per-node") or 1
    if "--overcommit" in options or not largest:
        return None
    fewer = "request fewer, or use another --partition, which `sinfo` lists"
    total = each * number(options, "--ntasks")
    room = (min(most, _most_nodes(options)) or most) * largest
    if total > room and "--nodelist" not in options:
        what = [f"{o}={options[o]}" for o in ("--nodes", "--ntasks", "--cpus-per-task") if o in options]
        return UsageError(
            f"{' '.join(what)}: {counted(total, 'CPU')}, but {counted(room // largest, 'node')} of partition "
            f"{name} have at most {room}",
            hint=fewer,
        )
    if each * tasks > largest:
        what = [f"{o}={options[o]}" for o in ("--ntasks-per-node", "--cpus-per-task") if o in options]
        return UsageError(
            f"{' '.join(what)}: {counted(each * tasks, 'CPU')} per node, but nodes of partition {name} have "
            f"at most {largest}",
            hint=fewer,
        )
    return None


def _most_nodes(options: Mapping[str, str]) -> int:
    """The largest number of nodes that a job may get, such as 4 for ``--nodes=2-4``; 0 without the option."""
    return number({"most": options.get("--nodes", "").rpartition("-")[2]}, "most")


def most_nodes(text: str, options: Mapping[str, str]) -> PartitionNodes:
    """The most frequent kind of selected nodes in sinfo's ``text``.  Raises HostError if there are none."""
    kinds = [kind for kind in _kinds(text) if kind.cpus]
    if "--partition" not in options:
        kinds = [kind for kind in kinds if kind.partition.endswith("*")] or kinds  # the default partition
    if (feature := options.get("--constraint", "")) and feature.replace("-", "").replace("_", "").isalnum():
        kinds = [kind for kind in kinds if feature in kind.features]
    if not kinds:
        raise HostError("sinfo lists no such node")
    most = max(kinds, key=lambda kind: kind.number)
    return most._replace(partition=most.partition.removesuffix("*"))


def _kinds(text: str) -> list[PartitionNodes]:
    return [kind for line in text.splitlines() if (kind := _kind(line))]


def _kind(line: str) -> PartitionNodes | None:
    partition, *numbers, features = line.split("|") if line.count("|") == 6 else ("", "", "")
    try:
        sockets, cores, threads, memory, number = (int(text.rstrip("+")) for text in numbers)
    except ValueError:
        return None  # with --clusters, a line with a cluster's name
    return PartitionNodes(
        partition, sockets, cores, threads, memory * 2**20, number, frozenset(features.split(","))
    )


def facts_of(nodes: PartitionNodes) -> HostFacts:
    """The facts of one of ``nodes``.  Each socket is assumed to be a NUMA node."""
    numbers = range(nodes.sockets * nodes.cores)
    rows = (
        Cpu(core + thread * len(numbers), core, core // nodes.cores, core // nodes.cores)
        for thread in range(nodes.threads)
        for core in numbers
    )
    return HostFacts(Topology(tuple(rows)), memory=nodes.memory)
