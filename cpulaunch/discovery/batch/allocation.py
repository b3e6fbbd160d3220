"""Read the hosts of a job from the variables of a batch system or Kubernetes, or from a hostfile."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from cpulaunch import launchers
from cpulaunch.errors import ConfigError
from cpulaunch.model.hosts import Host, parse_hostfile, parse_hosts
from cpulaunch.user_file import HOSTFILE_LIMIT, read_user_file

_NAME_THEM = "name the hosts with --hosts or a hostfile"
_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")


class Allocation(NamedTuple):
    """The hosts of an allocation.  Its name in messages is, for example, "Slurm job 4711"."""

    name: str
    hosts: tuple[Host, ...]


def allocation(environ: Mapping[str, str], read: Callable[[str], str | None]) -> Allocation | None:
    """The allocation that ``environ`` describes, or None.  ``read`` returns the text of a file.

    Raises ConfigError if the variables or files can't be understood.
    Sources: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"; PBS Professional User's Guide, "PBS_NODEFILE"; Using
    Platform LSF HPC, "Automatic generation of the job host file".
    """
    _refuse_heterogeneous(environ)
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        return Allocation(f"Slurm job {environ.get('SLURM_JOB_ID', '?')}", _slurm(nodes, environ))
    for system, variable, number in _NODE_FILES:
        if file := environ.get(variable):
            hosts = _in_node_file(f"${variable}", file, read(file))
            return Allocation(f"{system} job {environ.get(number, '?')}", hosts)
    if file := operators_hostfile(environ):
        return Allocation(file, _operators(file, read))
    return None


def operators_hostfile(environ: Mapping[str, str]) -> str | None:
    """The path of the MPI operator's hostfile if this is its launcher pod, else None.

    The operator puts the path into the MPI's own variable for the default hostfile.
    Source: kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ:  # every pod has this variable
        return None
    names = (name for mpi in launchers.MPIS for name in launchers.load_mpi(mpi).hostfile_variables)
    return next((environ[name] for name in names if environ.get(name)), None)


# Batch system, variable with the path of the node file, variable with the job's number.
_NODE_FILES = (("PBS", "PBS_NODEFILE", "PBS_JOBID"), ("LSF", "LSB_DJOB_HOSTFILE", "LSB_JOBID"))

_COMPONENT = "SLURM_JOB_NODELIST_HET_GROUP_"


def nodes_for_steps(environ: Mapping[str, str]) -> tuple[Host, ...] | None:
    """The nodes that srun uses by default for a step; None outside of a Slurm allocation."""
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get(_COMPONENT + "0")
    return parse_hosts(nodes, "$SLURM_JOB_NODELIST") if nodes else None


def allocated_nodes(environ: Mapping[str, str]) -> frozenset[str]:
    """The nodes of all components of the current Slurm job; empty outside of a job."""
    texts = [environ.get("SLURM_JOB_NODELIST", "")]
    texts += [nodes for name, nodes in environ.items() if name.startswith(_COMPONENT)]
    found = (parse_hosts(nodes, "$SLURM_JOB_NODELIST") for nodes in texts if nodes)
    return frozenset(host.name for hosts in found for host in hosts)


def times_requeued(environ: Mapping[str, str]) -> int:
    """How often Slurm has requeued the current job (sbatch(1), SLURM_RESTART_COUNT)."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isascii() and text.isdecimal() else 0


def _refuse_heterogeneous(environ: Mapping[str, str]) -> None:
    """Raise ConfigError in a heterogeneous job, because the user must select a component."""
    components = [nodes for name, nodes in sorted(environ.items()) if name.startswith(_COMPONENT)]
    if len(components) > 1:
        raise ConfigError(
            f"this Slurm job is heterogeneous, of {len(components)} components: {', '.join(components)}",
            hint="select nodes with --hosts: nodes of the first component for srun, any nodes for mpirun",
        )


def _slurm(nodes: str, environ: Mapping[str, str]) -> tuple[Host, ...]:
    hosts = parse_hosts(nodes, "$SLURM_JOB_NODELIST")
    # Without --ntasks and --ntasks-per-node, Slurm sets one task per node.  This is no choice of the user.
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    tasks = environ.get("SLURM_TASKS_PER_NODE")
    if not tasks or not asked:
        return hosts
    counts = _counts("$SLURM_TASKS_PER_NODE", tasks)
    if len(counts) != len(hosts):
        if "SLURM_STEP_ID" in environ:  # the numbers are those of the current step
            return hosts
        raise ConfigError(
            f"$SLURM_TASKS_PER_NODE: {tasks} is for {len(counts)} nodes, but {nodes} are {len(hosts)}",
            hint=_NAME_THEM,
            part=tasks,
        )
    return tuple(Host(host.name, count) for host, count in zip(hosts, counts, strict=True))


def _operators(file: str, read: Callable[[str], str | None]) -> tuple[Host, ...]:
    """The hosts of the operator's hostfile.  Their slots are the job's ``slotsPerWorker``.

    With ``runLauncherAsWorker``, this pod is one of the hosts.  It gets its short name, because Intel's
    mpiexec would use ssh for any other name, and this pod has no sshd.
    """
    if (text := read(file)) is None:
        raise ConfigError(
            f"the MPI operator's hostfile {file} cannot be read", hint="name the workers with --hosts"
        )
    own = (read("/etc/hostname") or "").strip()
    hosts = [
        Host(own, host.slots) if host.name.partition(".")[0] == own else host
        for host in parse_hostfile(text, file)
    ]
    # 1 is the default of slotsPerWorker, and therefore no choice of the user.
    asked = any(host.slots != 1 for host in hosts)
    return tuple(host if asked else Host(host.name) for host in hosts)


def _counts(variable: str, text: str) -> list[int]:
    """Parse a text such as ``2(x3),1`` into one number per host: 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        if not (match := _TASKS.fullmatch(part.strip())):
            raise ConfigError(f"{variable}: {part!r} is not like 2(x3)", part=part)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def cpus_of_nodes(environ: Mapping[str, str]) -> dict[str, int]:
    """The number of the Slurm job's CPUs on each node; empty if unknown."""
    nodes, text = nodes_for_steps(environ), environ.get("SLURM_JOB_CPUS_PER_NODE")
    if not nodes or not text:
        return {}
    counts = _counts("$SLURM_JOB_CPUS_PER_NODE", text)
    return {host.name: count for host, count in zip(nodes, counts, strict=False)}


def _in_node_file(variable: str, file: str, text: str | None) -> tuple[Host, ...]:
    """The hosts of a node file, which has one line per rank in any order."""
    if text is None:
        raise ConfigError(f"{variable}: {file} cannot be read", hint=_NAME_THEM)
    lines = Counter(text.split())
    if not lines:
        raise ConfigError(f"{variable}: {file} names no host", hint=_NAME_THEM)
    # If each host has a single line, the file doesn't contain numbers of ranks.
    has_counts = max(lines.values()) > 1
    return tuple(
        Host(parse_hosts(name, variable)[0].name, n if has_counts else None) for name, n in lines.items()
    )


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read the hostfile at ``path``.  Raises ConfigError, with ``file:line`` for a malformed line."""
    try:
        text = read_user_file(path, HOSTFILE_LIMIT).decode("utf-8-sig")
    except OSError as e:
        raise ConfigError(
            f"hostfile {path}: cannot be read: {e.strerror}",
            hint="one host per line: host, host:N or host slots=N",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"hostfile {path}: not UTF-8 text") from None
    return parse_hostfile(text, str(path))
