"""Slurm's srun: one step for all ranks, within the allocation that cpulaunch runs in.

Sources: srun(1) of Slurm 22.05, and the behaviour of a real Slurm (`tests/slurm`).
"""

from __future__ import annotations

import re
import signal

from cpulaunch.errors import PlanError
from cpulaunch.launchers.agent_command import agent_argv, placement_variables
from cpulaunch.launchers.base import Launcher, StartFailure
from cpulaunch.launchers.command import Command, Installation
from cpulaunch.launchers.mpi import ORPHAN_MARGIN
from cpulaunch.launchers.reach import ANY_HOST, Obstacle, without_name
from cpulaunch.model.hosts import parse_hosts
from cpulaunch.plan.placement import IdentityVariables
from cpulaunch.plan.plan import Plan

HOSTS = "hosts"
"""The name of the file that has a line for each rank, with its host."""

OWN_STEP = (
    # Share all resources of the allocation with other steps, such as the one that cpulaunch may run in.
    "--overlap",
    "--overcommit",
    # cpulaunch binds the ranks, and the agents take no part in any MPI.
    "--cpu-bind=none",
    "--mpi=none",
    "--export=ALL",
)

NOT_HANDED_ON = (
    "SLURM_CONSTRAINT", "SLURM_CORE_SPEC", "SLURM_CPUS_PER_GPU", "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION", "SLURM_DIST_PLANESIZE", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_EXPORT_ENV",
    "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GRES", "SLURM_HINT", "SLURM_HOSTFILE",
    "SLURM_KILL_BAD_EXIT", "SLURM_LABELIO", "SLURM_MEM_BIND", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE", "SLURM_MPI_TYPE", "SLURM_NNODES", "SLURM_NPROCS", "SLURM_NTASKS",
    "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_SOCKET",
    "SLURM_OPEN_MODE", "SLURM_REMOTE_CWD", "SLURM_RESV_PORTS", "SLURM_SPREAD_JOB", "SLURM_STDERRMODE",
    "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STEP_GRES", "SLURM_THREADS", "SLURM_THREADS_PER_CORE",
    "SLURM_THREAD_SPEC", "SLURM_TRES_PER_TASK", "SLURM_UNBUFFEREDIO", "SLURM_USE_MIN_NODES", "SLURM_WAIT",
    "SLURM_WORKING_DIR", "SRUN_CPUS_PER_TASK", "SRUN_EXPORT_ENV",
)  # fmt: skip
"""Variables that srun reads as its options, and which are removed from its environment.

sbatch and salloc set some of them for the job, but they don't fit this step: SLURM_EXACT gives it fewer CPUs
than the allocation has, SLURM_LABELIO puts numbers before its output, and the variables for memory contradict
each other.
"""

_REMEDIES = (
    ("Communication connection failure", "no slurmd answers there: `scontrol show node {host}`"),
    ("Requested node configuration is not available", "is it one of the allocation's?  `scontrol show job`"),
    *((words, "salloc or sbatch gives another allocation") for words in ("has expired", "Invalid job id")),
)

# How the task of a one-task step ended, which is no error of srun.
_OF_TASK = re.compile(r"srun: error: \S+: tasks? \d+: ")
_ERROR = re.compile(r"^srun: (?:error|fatal): (?P<why>[^\r\n]+)", re.MULTILINE)

# Failures of the step that starts the agents.
_FAILURES = (
    r"slurmstepd-(?P<host>\S+): error: execve\(\): (?P<why>[^\r\n]+)",
    r"srun: error: Task launch for \S+ failed on node (?P<host>[^:\s]+): (?P<why>[^\r\n]+)",
    r"srun: (?:error|fatal): (?P<why>(?:Slurm job \d+ has|Unable to|Invalid|Can't|SLURM_)[^\r\n]+)(?P<host>)",
)

_CANCELLED = re.compile(r"\*\*\* (?P<what>JOB|STEP) \S+ ON \S+ CANCELLED AT [\w:-]+(?P<why> DUE TO [\w ]+)?")

_NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
_ENDED_BY_US = "srun: forcing job termination"
"""The message of srun when it gets a signal itself."""


class SrunReach:
    """Runs commands as steps of one task, which share the allocation with other steps."""

    program = "srun"

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        without = (word for name in NOT_HANDED_ON for word in ("-u", name))
        one = ("--nodes=1", "--ntasks=1", f"--nodelist={host}", "--chdir=/")
        return ("env", *without, "srun", *OWN_STEP, *one, "sh", "-c", line)

    def by_hand(self, host: str) -> str:
        return f"srun --overlap --nodes=1 --ntasks=1 --nodelist={host} true"

    def obstacle(self, host: str, exit_code: int, error: str) -> Obstacle | None:
        said = [match for match in _ERROR.finditer(error) if not _OF_TASK.match(match[0])]
        if not said:
            return None
        why = said[0]["why"]
        remedy = next((text for words, text in _REMEDIES if words in why), "`{by_hand}` shows more")
        remedy = remedy.replace("{by_hand}", self.by_hand(ANY_HOST))
        return Obstacle(f"srun: {without_name(host, why)}", remedy, hopeless=True)


class Srun(Launcher):
    name = "slurm"
    title = "srun"
    identity = IdentityVariables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    # At the first signal, srun has slurmd kill the step's processes, and waits for them.
    stop_signals = (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
    reach = SrunReach()
    noise = (
        "srun: cluster configuration lacks support for cpu binding",
        _ENDED_BY_US,
        "srun: Job step aborted: Waiting up to ",
        "srun: got SIGCONT",  # Slurm sends it with each of its SIGTERMs
    )
    ranks_outlive_it = True

    def commands(self, plan: Plan, installation: Installation) -> tuple[Command, ...]:
        """The single srun command of a plan.  Raises PlanError for hosts given by address."""
        if address := next((h.host for h in plan.hosts if ":" in h.host or _is_number(h.host)), ""):
            raise PlanError(
                f"srun takes names of nodes only: {address} is an address",
                hint="without --hosts and --hostfile, the allocation's nodes are taken",
            )
        placement = placement_variables(plan, self)
        argv = ["srun", *OWN_STEP, "--kill-on-bad-exit=0", "--wait=0"]
        argv += [f"--input={plan.settings.output.stdin}"]
        argv += [f"--chdir={plan.program.directory}", f"--ntasks={plan.world_size}"]
        # Only the distribution "arbitrary" lets us place ranks: otherwise, srun orders the nodes itself.
        argv += ["--distribution=arbitrary", f"--nodelist=./{HOSTS}"]
        argv += [*plan.mpi_args, *agent_argv(plan, installation)]
        shared = {name: value for name, value in plan.env.items() if name not in plan.private}
        command = Command(
            tuple(argv),
            {**shared, **placement},
            {HOSTS: "".join(f"{host.host}\n" for host in plan.hosts for _ in host.ranks)},
            unset=NOT_HANDED_ON,
            orphaned_for=plan.settings.watch.grace_period + ORPHAN_MARGIN,
        )
        return (command,)

    def start_failure(self, text: str, *, ended: bool = False) -> StartFailure | None:
        for pattern in _FAILURES:
            if match := re.search(pattern, text):
                return StartFailure(match["host"], match["why"])
        return None

    def cancellation(self, text: str) -> str:
        match = _CANCELLED.search(text)
        if not match or _ENDED_BY_US in text:
            return ""
        return f"Slurm cancelled the {match['what'].lower()}{(match['why'] or '').lower()}".rstrip()

    def lost_hosts(self, text: str) -> tuple[str, ...]:
        found = (parse_hosts(nodes, self.title) for nodes in _NODE_FAILURE.findall(text))
        return tuple(host.name for hosts in found for host in hosts)


def _is_number(host: str) -> bool:
    return host.count(".") == 3 and host.replace(".", "").isdecimal()


SRUN = Srun()
