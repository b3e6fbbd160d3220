"""A real Slurm on a cluster of namespaces: slurmctld on the host ``login``, slurmd on all others.

    with Queue(("login", "node0", "node1")) as queue:
        queue.run("login", ["srun", "-N2", "hostname"])

Its programs come from Debian's packages slurmctld, slurmd, slurm-client and munge.  State and sockets are
in each host's own /run, so they disappear with the hosts.
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

from support.faults import Cluster
from support.namespaces import SEARCH, until
from support.namespaces import why_not as why_no_hosts

TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
CPUS = len(os.sched_getaffinity(0))
"""The CPUs of each host, which are this machine's; Slurm gives a job as many as it requests."""

UP_WITHIN = 30.0
"""Seconds within which all nodes must be idle."""

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
"""The directory of control groups of version 1, as Slurm can make groups of version 2 only below
systemd's."""

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
    """Return the reason why no Slurm can run here, or None."""
    missing = [package for tool, package in TOOLS.items() if not shutil.which(tool, path=SEARCH)]
    return f"apt-get install {' '.join(missing)}" if missing else why_no_hosts()


class Queue(Cluster):
    """A cluster whose hosts are Slurm's nodes, except for the first, on which jobs are submitted.

    ``cgroups``: control groups also keep a job's processes on its CPUs.  These groups are this machine's, in
    `CPUSETS`, and named after the hosts, so no other cluster may have hosts of these names.
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
        """The variables that Slurm's commands need."""
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
        """The number of idle nodes."""
        done = self.slurm("sinfo", "-h", "-t", "idle", "-o", "%D")
        return int(done.stdout or 0)

    def slurm(self, *argv: str, env: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands on the host where jobs are submitted."""
        return self.run(self.names[0], argv, timeout=30.0, env={**env, **self.environment})

    @contextlib.contextmanager
    def allocation(self, *options: str) -> Iterator[dict[str, str]]:
        """An allocation that lasts for the block; yields the variables of its shell."""
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
        """Kill Slurm's daemon.  The processes that it has started continue."""
        self._inside(name, "sh", "-c", "kill -KILL $(cat /run/slurm/slurmd.pid)")
        try:
            yield
        finally:
            self.run(name, ["slurmd", "-N", name], env={"PATH": SEARCH, **self.environment})
            until(lambda: not self._silent(), "the node to be there again", UP_WITHIN)

    @contextlib.contextmanager
    def down(self, name: str) -> Iterator[None]:
        """Set the node down, as an administrator would."""
        self.slurm("scontrol", "update", f"nodename={name}", "state=down", "reason=test")
        try:
            yield
        finally:
            self.slurm(
                "scontrol", "update", f"nodename={name}", "state=resume"
            )  # the node may have come back by itself
            until(lambda: not self._silent(), "the node to be there again", UP_WITHIN)

    def _silent(self) -> bool:
        """Return whether Slurm has lost a node, or considers it down."""
        states = self.slurm("sinfo", "-h", "-N", "-o", "%T").stdout.split()
        return any(state.endswith("*") or state.startswith("down") for state in states)

    def jobs(self) -> list[str]:
        """A line for each job that waits, runs, or is still ending: its number and state."""
        return self.slurm("squeue", "-h", "-o", "%i %t").stdout.splitlines()

    def processes(self, name: str | None = None) -> list[str]:
        """Return what `Hosts.processes` does, without Slurm's own daemons."""
        daemons = (
            "munged ",
            "slurmctld",
            "slurmd -N",
            ": slurm",
        )  # the last pattern is a helper of slurmctld
        return [line for line in super().processes(name) if not line.split(" ", 2)[2].startswith(daemons)]


def _first_word(line: str) -> str:
    return line.split()[0]
