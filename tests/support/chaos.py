"""Faults of jobs of four ranks on four hosts: the table of docs/reliability.md.

``scripts/chaos.py`` runs and times all of them, ``test_chaos.py`` a part of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpulaunch.launchers import MPIS
from support import chaos_restarts
from support.command import clean_environment, launcher_options
from support.faults import Cluster
from support.namespaces import until

HOSTS = ("node0", "node1", "node2", "node3")
LAUNCHERS = (*MPIS, "ssh")
"""The launchers that can start ranks on these hosts."""
GRACE, HEARTBEAT = 1.0, 6
TIMEOUT = 90.0
"""Seconds within which every job must have ended."""

# Ranks print "ready", and wait in the given way.  Once the file "trigger" exists, the ranks named in it fail.
PROGRAM = """\
import ctypes, os, pathlib, sys, time
mode, how, who = sys.argv[1:]
rank = int(os.environ["RANK"])
meant = who == "all" or who == str(rank)
if mode in ("gloo", "ccl"):
    import torch, torch.distributed as dist
    dist.init_process_group(mode)
    values = torch.ones(1000)
    dist.all_reduce(values)
print("ready", flush=True)
while not pathlib.Path("trigger").exists():
    if mode == "compute":
        sum(range(100_000))
    elif mode in ("gloo", "ccl") and not meant:
        dist.all_reduce(values)  # the hanging ranks never join this
    else:
        time.sleep(0.005)
if meant:
    match how:
        case "raise": raise ValueError(f"rank {rank} has no such luck")
        case "exit": sys.exit(5)
        case "leave": sys.exit(0)
        case "segv": ctypes.string_at(0)
        case "abort": os.abort()
        case "kill": os.kill(os.getpid(), 9)
        case "agent": os.kill(os.getppid(), 9)
time.sleep(600)
"""


@dataclass(frozen=True)
class Result:
    """The result of a job. ``seconds``: from the event to the launcher's end."""

    exit_code: int
    seconds: float
    stderr: str
    outcome: dict[str, object]
    left: list[str]


class Job:
    """A job on the cluster, its launcher on the host ``login``.

    ``since``: the time of its start, or of the event.
    """

    def __init__(
        self,
        cluster: Cluster,
        directory: Path,
        options: Sequence[str],
        *arguments: str,
        env: Mapping[str, str] = {},
    ) -> None:
        """``env``: further variables for the launcher."""
        self.cluster, self.directory, self.env = cluster, directory, env
        (directory / "program.py").write_text(PROGRAM)
        hostfile = cluster.hostfile(directory / "hostfile", HOSTS)
        self.argv = [sys.executable, "-m", "cpulaunch", "run", "-f", hostfile, "-ppn", "1", "--tee", "all"]
        self.argv += ["--grace-period", str(GRACE), "--heartbeat-timeout", str(HEARTBEAT), *options]
        self.argv += ["program.py", *arguments]

    def start(self) -> None:
        self.launcher = self.cluster.start(
            "login", self.argv, directory=self.directory, env=clean_environment(**self.env)
        )
        self.killer = threading.Timer(TIMEOUT, self.launcher.kill)
        self.killer.start()
        self.since = time.monotonic()

    def ready(self) -> None:
        """Wait until all ranks are ready."""
        assert self.launcher.stdout
        seen: set[str] = set()
        while len(seen) < len(HOSTS):
            line = self.launcher.stdout.readline()
            if not line:
                raise AssertionError(f"the job ended too soon:\n{self.launcher.communicate()[1]}")
            if line.endswith("] ready\n"):
                seen.add(line)

    def trigger(self) -> None:
        (self.directory / "trigger").touch()

    def signal(self, number: int) -> None:
        self.cluster.signal(self.launcher, number)

    def end(self) -> Result:
        """Wait until the launcher has ended, and find what is left of the job a moment later."""
        _, stderr = self.launcher.communicate()
        seconds = time.monotonic() - self.since
        self.killer.cancel()
        found = list(self.directory.glob("runs/*/outcome.json"))
        outcome = json.loads(found[0].read_text()) if found else {}
        deadline = time.monotonic() + GRACE + HEARTBEAT + 10
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return Result(self.launcher.returncode, seconds, stderr, outcome, left)

    def _left(self) -> list[str]:
        # If a host was cut off, neither end has noticed the loss of the other one yet.
        daemons = ("sshd: root@notty", "slurmstepd: ")
        return [line for line in self.cluster.processes() if not any(name in line for name in daemons)]


@dataclass(frozen=True)
class Event:
    """A fault of a job.

    ``happen(job, rank)`` is a context manager that injects it, and heals it at its end.  ``said`` is the
    message to the user, which has the rank's number and host.  ``at_start``: before the job starts.
    ``for_good``: the host can't be restored.  ``launchers``: the launchers that the fault can affect.
    """

    mode: str
    how: str
    exit_code: int | None
    said: Sequence[str]
    happen: Callable[[Job, int], contextlib.AbstractContextManager[None]]
    at_start: bool = False
    options: Sequence[str] = ()
    to_all: bool = False
    for_good: bool = False
    launchers: Sequence[str] = LAUNCHERS


@contextlib.contextmanager
def _trigger(job: Job, rank: int) -> Iterator[None]:
    job.trigger()
    yield


def _send(number: int) -> Callable[[Job, int], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def send(job: Job, rank: int) -> Iterator[None]:
        job.signal(number)
        yield

    return send


def _fault(name: str) -> Callable[[Job, int], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def fault(job: Job, rank: int) -> Iterator[None]:
        host = f"node{rank}"
        with getattr(job.cluster, name)(host):
            yield
        # The host's sshd hasn't noticed that the other end of a session is lost, and would wait for hours.
        with job.cluster.without_sshd(host, sessions=True):
            pass

    return fault


@contextlib.contextmanager
def _without_ssh(job: Job, rank: int) -> Iterator[None]:
    """End the connections to a host, and then trigger the end of the job."""
    with job.cluster.without_sshd(f"node{rank}", sessions=True):
        until(lambda: not _connections(job, rank), f"the connection to node{rank} to end", TIMEOUT)
        job.trigger()
        yield


def _connections(job: Job, rank: int) -> list[str]:
    shown = job.cluster.processes("login")
    return [line for line in shown if " ssh -o" in line and f" node{rank} " in line]


@contextlib.contextmanager
def _power_off(job: Job, rank: int) -> Iterator[None]:
    job.cluster.power_off(f"node{rank}")
    yield


@contextlib.contextmanager
def _without_python(job: Job, rank: int) -> Iterator[None]:
    with job.cluster.hidden(f"node{rank}", Path(sys.prefix)):
        yield


FIRST = "rank {rank} on node{rank} failed first"
NOT_STARTED = "rank {rank} on node{rank} was not started"
RAISED = (FIRST, "ValueError: rank {rank} has no such luck", "Traceback (most recent call last):")

EVENTS = {
    "raises while the others sleep": Event("sleep", "raise", 1, RAISED, _trigger),
    "raises while the others compute": Event("compute", "raise", 1, RAISED, _trigger),
    "raises while the others wait (gloo)": Event("gloo", "raise", 1, RAISED, _trigger),
    "raises while the others wait (ccl)": Event("ccl", "raise", 1, RAISED, _trigger),
    "exits with 5": Event("sleep", "exit", 5, (FIRST, "exit code 5"), _trigger),
    "leaves with 0 while the others wait (gloo)": Event(
        "gloo", "leave", 1, ("rank {rank} had exited with code 0",), _trigger
    ),
    "is killed": Event("sleep", "kill", 137, (FIRST, "SIGKILL"), _trigger),
    "is killed while the others wait (gloo)": Event("gloo", "kill", 137, (FIRST, "SIGKILL"), _trigger),
    "is killed while the others wait (ccl)": Event("ccl", "kill", 137, (FIRST, "SIGKILL"), _trigger),
    "segfaults": Event("sleep", "segv", 139, (FIRST, "SIGSEGV", "Segmentation fault"), _trigger),
    "aborts": Event("sleep", "abort", 134, (FIRST, "SIGABRT"), _trigger),
    "loses its agent": Event("sleep", "agent", 137, (FIRST, "agent ended without a report"), _trigger),
    "all raise at once": Event("sleep", "raise", 1, ("ValueError: rank ",), _trigger, to_all=True),
    "link cut": Event("sleep", "", 4, ("host node{rank} was lost",), _fault("cut")),
    "packets dropped": Event("sleep", "", 4, ("host node{rank} was lost",), _fault("dropping")),
    "host switched off": Event("sleep", "", 4, ("host node{rank} was lost",), _power_off, for_good=True),
    "ssh connection lost": Event(  # Open MPI ends the job
        "sleep", "leave", 0, (), _without_ssh, to_all=True, launchers=("intel", "mpich", "ssh")
    ),
    "packets dropped at start": Event(
        "sleep",
        "",
        3,
        ("node{rank}: ssh: connect to host node{rank}", "timed out"),
        _fault("dropping"),
        at_start=True,
    ),
    "packets dropped at start, no preflight": Event(
        "sleep",
        "",
        3,
        (NOT_STARTED, "on node{rank}: Connection timed out"),
        _fault("dropping"),
        at_start=True,
        options=("--skip-preflight",),
    ),
    "Python missing": Event(
        "sleep", "", 3, ("node{rank}: there is no {python}",), _without_python, at_start=True
    ),
    "Python missing, no preflight": Event(
        "sleep",
        "",
        3,
        (NOT_STARTED, "it couldn't be started on node{rank}: "),
        _without_python,
        at_start=True,
        options=("--skip-preflight",),
    ),
    "Ctrl-C": Event(
        "sleep", "", 130, ("SIGINT: ending all ranks", "interrupted after"), _send(signal.SIGINT)
    ),
    "SIGTERM": Event("sleep", "", 143, ("SIGTERM: ending all ranks",), _send(signal.SIGTERM)),
    "SIGHUP": Event("sleep", "", 129, ("SIGHUP: ending all ranks",), _send(signal.SIGHUP)),
    "launcher killed": Event("sleep", "", None, (), _send(signal.SIGKILL)),
}
"""Faults of a rank, its host or the launcher, in the order of the table."""


def run(
    cluster: Cluster, directory: Path, mpi: Sequence[str], name: str, rank: int, moment: float = 0
) -> Result:
    """Inject the event ``name`` into ``rank``, or its host, in a new job, ``moment`` s after all ranks are
    ready."""
    return happens(EVENTS[name], cluster, directory, mpi, rank, moment)


def happens(
    event: Event,
    cluster: Cluster,
    directory: Path,
    mpi: Sequence[str],
    rank: int,
    moment: float = 0,
    env: Mapping[str, str] = {},
) -> Result:
    """Inject ``event`` into ``rank``, or its host, in a new job, ``moment`` s after all ranks are ready."""
    options = [*mpi, *event.options]
    if event.mode in ("gloo", "ccl"):
        options += ["--backend", event.mode]
    who = "all" if event.to_all else str(rank)
    job = Job(cluster, directory, options, event.mode, event.how, who, env=env)
    if not event.at_start:
        job.start()
        job.ready()
        time.sleep(moment)
        job.since = time.monotonic()
    with event.happen(job, rank):
        if event.at_start:
            job.start()
        return job.end()


def problems(event: Event, rank: int, result: Result) -> list[str]:
    """Return how a result differs from the expected one."""
    found = [f"left: {line}" for line in result.left]
    if event.exit_code is not None:
        if result.exit_code != event.exit_code:
            found.append(f"exit code {result.exit_code}, not {event.exit_code}")
        if result.outcome.get("exit_code", result.exit_code) != result.exit_code:
            found.append(f"outcome.json says {result.outcome['exit_code']}")
    found += [
        f"not said: {said}"
        for each in event.said
        if (said := each.format(rank=rank, python=sys.executable)) not in result.stderr
    ]
    if result.stderr.count("╭") > 1:
        found.append("more than one box")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Let things befall jobs on four hosts, and see what is said."
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often; default 1")
    parser.add_argument("--launcher", action="append", choices=LAUNCHERS, help="default: all")
    parser.add_argument("--only", default="", help="only events with this in their name")
    parser.add_argument("--seed", type=int, default=None, help="for the ranks that are hit, and the moments")
    parser.add_argument("--restarts", action="store_true", help="one job that is struck down again and again")
    parser.add_argument("--slurm", action="store_true", help="started by srun, on nodes of a Slurm")
    parser.add_argument("--blows", type=int, default=50, help="how often; default 50")
    parser.add_argument("--backend", action="append", choices=("ccl", "gloo"), help="default: both")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    if arguments.restarts:
        backends, launchers = arguments.backend or ("ccl", "gloo"), arguments.launcher or ("intel",)
        codes = [chaos_restarts.main(backends, launcher, arguments.blows, seed) for launcher in launchers]
        return max(codes)
    dice = random.Random(seed)
    print(
        f"seed {seed}; heartbeat_timeout {HEARTBEAT} s, grace_period {GRACE} s; seconds to the launcher's end"
    )
    if arguments.slurm:
        from support import chaos_slurm

        return chaos_slurm.main(arguments.rounds, arguments.only, dice)
    wrong = 0
    with Cluster(("login", *HOSTS)) as cluster:
        for name in (each for each in EVENTS if arguments.only in each):
            for launcher in EVENTS[name].launchers:
                if launcher not in (arguments.launcher or LAUNCHERS):
                    continue
                options = launcher_options(launcher)

                def once(
                    directory: Path, rank: int, name: str = name, options: Sequence[str] = options
                ) -> Result:
                    with hosts_for(cluster, EVENTS[name]) as hosts:
                        return run(hosts, directory, options, name, rank, dice.random())

                wrong += timed(name, EVENTS[name], launcher, arguments.rounds, dice, once)
    return 1 if wrong else 0


def hosts_for(cluster: Cluster, event: Event) -> contextlib.AbstractContextManager[Cluster]:
    """Return the cluster for an event; an event that can't be healed gets its own cluster."""
    return Cluster(("login", *HOSTS)) if event.for_good else contextlib.nullcontext(cluster)


def timed(
    name: str,
    event: Event,
    launcher: str,
    rounds: int,
    dice: random.Random,
    once: Callable[[Path, int], Result],
) -> bool:
    """Inject an event by ``once`` in each round, and print a line; return whether anything was wrong."""
    times, found = [], []
    for _ in range(rounds):
        rank = dice.randrange(len(HOSTS))
        with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
            result = once(Path(directory), rank)
        times.append(result.seconds)
        if these := problems(event, rank, result):
            found += [f"rank {rank}: {each}" for each in these]
            found += [f"    {line}" for line in result.stderr.splitlines()]
    spread = f"{min(times):5.1f} {statistics.median(times):5.1f} {max(times):5.1f}"
    print(
        f"{name:42} {launcher:8} {spread}  exit {result.exit_code:4}  {'WRONG' if found else 'ok'}",
        flush=True,
    )
    for line in found:
        print(f"    {line}", flush=True)
    return bool(found)
