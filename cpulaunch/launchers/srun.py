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
"""The name of the file with the host of each rank, one per line."""

OWN_STEP = (
    # Share the allocation's resources with other steps.  cpulaunch itself may run in one.
    "--overlap",
    "--overcommit",
    # cpulaunch binds the ranks, and agents don't use MPI.
    "--cpu-bind=none",
    "--mpi=none",
    "--export=ALL",
)

UNSET = (
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
"""Variables that would change srun's options.  They are removed from its environment.

sbatch and salloc set some of them, but they don't suit this step.  For example, SLURM_EXACT restricts the
step to some of the allocation's CPUs, and SLURM_LABELIO adds task numbers to its output.
"""

_REMEDIES = (
    ("Communication connection failure", "no slurmd answers there: `scontrol show node {host}`"),
    ("Requested node configuration is not available", "is it one of the allocation's?  `scontrol show job`"),
    *((words, "salloc or sbatch gives another allocation") for words in ("has expired", "Invalid job id")),
)

# The end of a task, which is no error of srun.
_TASK_ERROR = re.compile(r"srun: error: \S+: tasks? \d+: ")
_ERROR = re.compile(r"^srun: (?:error|fatal): (?P<why>[^\r\n]+)", re.MULTILINE)

# Failures of the step that starts the agents.
_FAILURES = (
    r"slurmstepd-(?P<host>\S+): error: execve\(\): (?P<why>[^\r\n]+)",
    r"srun: error: Task launch for \S+ failed on node (?P<host>[^:\s]+): (?P<why>[^\r\n]+)",
    r"srun: (?:error|fatal): (?P<why>(?:Slurm job \d+ has|Unable to|Invalid|Can't|SLURM_)[^\r\n]+)(?P<host>)",
)

_CANCELLED = re.compile(r"\*\*\* (?P<what>JOB|STEP) \S+ ON \S+ CANCELLED AT [\w:-]+(?P<why> DUE TO [\w ]+)?")

_NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
_SIGNALED = "srun: forcing job termination"
"""srun's message after it got a signal."""


class SrunReach:
    """Runs each command as a step of one task."""

    program = "srun"

    def command(self, host: str, line: str) -> tuple[str, ...] | None:
        unset = (word for name in UNSET for word in ("-u", name))
        one_task = ("--nodes=1", "--ntasks=1", f"--nodelist={host}", "--chdir=/")
        return ("env", *unset, "srun", *OWN_STEP, *one_task, "sh", "-c", line)

    def by_hand(self, host: str) -> str:
        return f"srun --overlap --nodes=1 --ntasks=1 --nodelist={host} true"

    def obstacle(self, host: str, exit_code: int, error: str) -> Obstacle | None:
        errors = [match for match in _ERROR.finditer(error) if not _TASK_ERROR.match(match[0])]
        if not errors:
            return None
        why = errors[0]["why"]
        remedy = next((text for words, text in _REMEDIES if words in why), "`{by_hand}` shows more")
        remedy = remedy.replace("{by_hand}", self.by_hand(ANY_HOST))
        return Obstacle(f"srun: {without_name(host, why)}", remedy, hopeless=True)


class Srun(Launcher):
    name = "slurm"
    title = "srun"
    identity = IdentityVariables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    # After the first signal, srun makes slurmd kill the step's processes, and waits for them.
    stop_signals = (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
    reach = SrunReach()
    noise = (
        "srun: cluster configuration lacks support for cpu binding",
        _SIGNALED,
        "srun: Job step aborted: Waiting up to ",
        "srun: got SIGCONT",  # Slurm sends it with each of its SIGTERMs
    )
    ranks_outlive_it = True

    def commands(self, plan: Plan, installation: Installation) -> tuple[Command, ...]:
        """Return the single srun command of ``plan``.  Raises PlanError if a host is an address."""
        if address := next((h.host for h in plan.hosts if ":" in h.host or _is_number(h.host)), ""):
            raise PlanError(
                f"srun accepts only names of nodes, but {address} is an address",
                hint="omit --hosts and --hostfile to use the allocation's nodes",
            )
        placement = placement_variables(plan, self)
        argv = ["srun", *OWN_STEP, "--kill-on-bad-exit=0", "--wait=0"]
        argv += [f"--input={plan.settings.output.stdin}"]
        argv += [f"--chdir={plan.program.directory}", f"--ntasks={plan.world_size}"]
        # With any other distribution, srun orders the nodes itself.
        argv += ["--distribution=arbitrary", f"--nodelist=./{HOSTS}"]
        argv += [*plan.mpi_args, *agent_argv(plan, installation)]
        shared = {name: value for name, value in plan.env.items() if name not in plan.private}
        command = Command(
            tuple(argv),
            {**shared, **placement},
            {HOSTS: "".join(f"{host.host}\n" for host in plan.hosts for _ in host.ranks)},
            unset=UNSET,
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
        if not match or _SIGNALED in text:
            return ""
        return f"Slurm cancelled the {match['what'].lower()}{(match['why'] or '').lower()}".rstrip()

    def lost_hosts(self, text: str) -> tuple[str, ...]:
        found = (parse_hosts(nodes, self.title) for nodes in _NODE_FAILURE.findall(text))
        return tuple(host.name for hosts in found for host in hosts)


def _is_number(host: str) -> bool:
    return host.count(".") == 3 and host.replace(".", "").isdecimal()


SRUN = Srun()
