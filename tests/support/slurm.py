"""A real Slurm on a cluster of namespaces: slurmctld on the host ``login``, slurmd on all others.

    with Queue(("login", "node0", "node1")) as queue:
        queue.run("login", ["srun", "-N2", "hostname"])

Its programs are those of Debian's packages slurmctld, slurmd, slurm-client and munge.  State and sockets lie
in each host's own /run, so all of it goes with the hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from support.faults import Cluster
from support.namespaces import SEARCH, until
from support.namespaces import why_not as why_no_hosts

if TYPE_CHECKING:
    pass  # Python 3.11

TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
CPUS = len(os.sched_getaffinity(0))
"""What each host has, of which Slurm gives a job as many as it asks for: they are this machine's."""

UP_WITHIN = 30.0
"""Seconds in which all nodes are idle."""

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin={tasks}
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={nodes} CPUs={cpus} RealMemory=4000 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4 PreemptMode=OFF
PartitionName=spare Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=abrupt Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""

CPUSETS = Path("/sys/fs/cgroup/cpuset")
"""Where control groups of version 1 are; Slurm can make groups of version 2 only in systemd's."""

_CGROUPS = """\
CgroupPlugin=cgroup/v1
CgroupAutomount=no
CgroupMountpoint=/sys/fs/cgroup
ConstrainCores=yes
"""

_START = r"""
set -e
mkdir -p /run/munge /run/slurm/state /run/slurm/spool
chmod 755 /run/munge
cp "$KEY" /run/slurm/munge.key
chmod 600 /run/slurm/munge.key
munged --force --key-file=/run/slurm/munge.key --pid-file=/run/munge/munged.pid \
    --log-file=/run/munge/munged.log --seed-file=/run/munge/seed 2>/run/munge/start.log
"$@"
"""


def why_not() -> str | None:
    """Why there can be no Slurm here; None where there can."""
    missing = [package for tool, package in TOOLS.items() if not shutil.which(tool, path=SEARCH)]
    return f"apt-get install {' '.join(missing)}" if missing else why_no_hosts()


class Queue(Cluster):
    """A cluster whose hosts are Slurm's nodes, but for the first, on which jobs are submitted.

    ``cgroups``: a job's processes are kept to its CPUs by control groups, too.  These are the machine's, in
    `CPUSETS`, and named after the hosts, so nobody else may have hosts of the same names.
    """

    def __init__(self, names: Sequence[str], *, cgroups: bool = False) -> None:
        super().__init__(names)
        self._cgroups = cgroups

    def _up(self) -> None:
        super()._up()
        self._start_slurm()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, tb)
        for name in self.names if self._cgroups else ():
            for directory, _, _ in os.walk(CPUSETS / f"slurm_{name}", topdown=False):
                os.rmdir(directory)

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need to find it."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def _start_slurm(self) -> None:
        controller, *nodes = self.names
        tasks = "task/affinity,task/cgroup" if self._cgroups else "task/affinity"
        (self.directory / "slurm.conf").write_text(
            _CONFIGURATION.format(controller=controller, nodes=",".join(nodes), cpus=CPUS, tasks=tasks)
        )
        (self.directory / "cgroup.conf").write_text(_CGROUPS)
        (key := self.directory / "munge.key").write_bytes(os.urandom(128))
        starting = []
        for name in self.names:
            daemon = ["slurmctld"] if name == controller else ["slurmd", "-N", name]
            starting.append(self._start_daemon(name, daemon, key))
        for process in starting:
            _, error = process.communicate(timeout=UP_WITHIN)
            if process.returncode:
                raise RuntimeError(f"Slurm can't be started: {error}")
        until(lambda: self.idle() == len(nodes), "all nodes to be idle", UP_WITHIN)

    def _start_daemon(self, name: str, daemon: Sequence[str], key: Path) -> subprocess.Popen[str]:
        argv = ["sh", "-c", _START, "sh", *daemon]
        return subprocess.Popen(
            self._nsenter(name, *argv),
            env={"PATH": SEARCH, "KEY": str(key), **self.environment},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def idle(self) -> int:
        """How many nodes are idle."""
        done = self.slurm("sinfo", "-h", "-t", "idle", "-o", "%D")
        return int(done.stdout or 0)

    def slurm(self, *argv: str, env: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands where jobs are submitted."""
        return self.run(self.names[0], argv, timeout=30.0, env={**env, **self.environment})

    @contextlib.contextmanager
    def allocation(self, *options: str) -> Iterator[dict[str, str]]:
        """An allocation that lasts while this is entered: the variables that are set in its shell."""
        done = self.slurm("salloc", "--no-shell", *options)
        found = re.search(r"Granted job allocation (\d+)", done.stderr)
        assert found, done.stderr
        job = found[1]
        try:
            nodes = self.slurm("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()
            yield self.environment | {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": nodes}
        finally:
            self.slurm("scancel", job)
            until(lambda: job not in map(_first_word, self.jobs()), "the allocation to end", UP_WITHIN)

    @contextlib.contextmanager
    def without_slurmd(self, name: str) -> Iterator[None]:
        """Slurm's daemon is killed; what it has started goes on."""
        self._inside(name, "sh", "-c", "kill -KILL $(cat /run/slurm/slurmd.pid)")
        try:
            yield
        finally:
            self.run(name, ["slurmd", "-N", name], env={"PATH": SEARCH, **self.environment})
            until(lambda: not self._silent(), "the node to be there again", UP_WITHIN)

    @contextlib.contextmanager
    def down(self, name: str) -> Iterator[None]:
        """An administrator has set the node down."""
        self.slurm("scontrol", "update", f"nodename={name}", "state=down", "reason=test")
        try:
            yield
        finally:
            self.slurm(
                "scontrol", "update", f"nodename={name}", "state=resume"
            )  # it may have come back itself
            until(lambda: not self._silent(), "the node to be there again", UP_WITHIN)

    def _silent(self) -> bool:
        """Whether Slurm misses a node, or takes it for down."""
        states = self.slurm("sinfo", "-h", "-N", "-o", "%T").stdout.split()
        return any(state.endswith("*") or state.startswith("down") for state in states)

    def jobs(self) -> list[str]:
        """A line for each job that waits, runs, or has not quite ended: its number and state."""
        return self.slurm("squeue", "-h", "-o", "%i %t").stdout.splitlines()

    def processes(self, name: str | None = None) -> list[str]:
        """Those of `Hosts.processes` that aren't Slurm's own daemons."""
        daemons = ("munged ", "slurmctld", "slurmd -N", ": slurm")  # the last is a helper of slurmctld
        return [line for line in super().processes(name) if not line.split(" ", 2)[2].startswith(daemons)]


def _first_word(line: str) -> str:
    return line.split()[0]
