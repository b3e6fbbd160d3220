"""A training job whose processes are killed repeatedly must end with the weights of an undisturbed run.

``scripts/chaos.py --restarts`` runs it; the program is examples/checkpoint.py, with slower steps so that
there is time to kill.
"""

from __future__ import annotations

import os
import queue
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.command import REPOSITORY, clean_environment, launcher_options
from support.faults import Cluster

RANKS = 4
STEPS = 300
HEARTBEAT, GRACE = 6, 1.0
SLOW = 0.05
"""Seconds that are added to each step."""
EVERY = 3
"""Steps from one checkpoint to the next."""
LONGEST = 240.0
"""Seconds within which a job must print a line, even after a restart."""

SHARES = {"rank": 20, "agent": 12, "mpiexec": 12, "host": 6}
"""The targets of fifty kills, with their numbers."""

# Each rank looks for an order to kill itself, or its parent, the agent.
PROGRAM = f"""\
import os, pathlib, runpy, signal, socket, sys, threading, time
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
rank, attempt = os.environ["RANK"], os.environ["CPULAUNCH_RESTART_COUNT"]
steps = 0
def stepped(*_):
    global steps
    steps += 1
    if rank == "0":
        print("stepped", attempt, steps, flush=True)
    time.sleep({SLOW})
def look():
    while True:
        try:
            meant, who, what = pathlib.Path("blow").read_text().split()
        except FileNotFoundError:
            meant = who = ""
        if (meant, who) == (attempt, rank):
            os.kill(os.getpid() if what == "rank" else os.getppid(), signal.SIGKILL)
        time.sleep(0.001)
threading.Thread(target=look, daemon=True).start()
register_optimizer_step_post_hook(stepped)
print("rank", attempt, rank, socket.gethostname(), flush=True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class Seen:
    """The output of a job: its attempt and steps, the host of each rank, the digest of its weights."""

    attempt: int = -1
    steps: int = 0
    hosts: dict[int, str] = field(default_factory=dict)
    weights: str = ""

    def hear(self, line: str) -> None:
        words = line.partition("] ")[2].split()
        match words:
            case ["rank", attempt, rank, host]:
                if int(attempt) > self.attempt:
                    self.attempt, self.steps = int(attempt), 0
                self.hosts[int(rank)] = host
            case ["stepped", attempt, steps] if int(attempt) == self.attempt:
                self.steps = int(steps)
            case ["weights", weights]:
                self.weights = weights


class Job:
    """A job on the cluster, and its output."""

    def __init__(self, cluster: Cluster, directory: Path, backend: str, mpi: Sequence[str]) -> None:
        self.cluster, self.directory, self.seen = cluster, directory, Seen()
        (directory / "program.py").write_text(PROGRAM)
        hostfile = cluster.hostfile(
            directory / "hostfile", [name for name in cluster.names if name != "login"]
        )
        argv = [
            sys.executable, "-m", "cpulaunch", "run", "-f", hostfile, "-ppn", "1", "--nnodes", str(RANKS),
            "--max-restarts", "20", "--set", "watch.restart_always=true", "--checkpoint-every", str(EVERY), "--tee", "all",
            "--grace-period", str(GRACE), "--heartbeat-timeout", str(HEARTBEAT), "--backend", backend, *mpi,
            "program.py", REPOSITORY / "examples" / "checkpoint.py", "--steps", str(STEPS),
        ]  # fmt: skip
        self.launcher = cluster.start("login", argv, directory=directory, env=clean_environment())
        self.said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._readers = [threading.Thread(target=read) for read in (self._read_stdout, self._read_stderr)]
        for reader in self._readers:
            reader.start()

    def _read_stdout(self) -> None:
        assert self.launcher.stdout
        for line in self.launcher.stdout:
            self._lines.put(line.rstrip())
        self._lines.put(None)

    def _read_stderr(self) -> None:
        assert self.launcher.stderr
        self.said.extend(self.launcher.stderr)

    def wait(self, attempt: int, steps: int) -> bool:
        """Wait until an attempt has made ``steps`` steps; False if the job ends before that."""
        while self.seen.attempt < attempt or (self.seen.attempt == attempt and self.seen.steps < steps):
            try:
                line = self._lines.get(timeout=LONGEST)
            except queue.Empty:
                raise RuntimeError("the job doesn't go on:\n" + "".join(self.said[-40:])) from None
            if line is None:
                return False
            self.seen.hear(line)
        return True

    def end(self) -> int:
        """Wait for the job's end; return its exit code."""
        self.wait(sys.maxsize, 0)
        for reader in self._readers:
            reader.join()
        return self.launcher.wait(LONGEST)

    def kill(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        for reader in self._readers:
            reader.join(LONGEST)

    def strike(self, what: str, rank: int) -> None:
        if what == "host":
            self.cluster.power_off(self.seen.hosts[rank])
        elif what == "mpiexec":
            (pid,) = [
                line.split()[1]
                for line in self.cluster.processes("login")
                if Path(line.split()[2]).name.startswith("mpiexec")
                or ("run_spawner.py" in line and " -- " in line)
            ]
            self.cluster.run("login", ["kill", "-KILL", pid])
        else:
            blow = self.directory / "blow"
            (new := blow.with_suffix(".new")).write_text(f"{self.seen.attempt} {rank} {what}")
            new.rename(blow)

    def wait_for_save(self) -> None:
        """Wait for at most a second until a checkpoint is being written."""
        end = time.monotonic() + 1
        while time.monotonic() < end:
            if any(name.endswith(".partial") for name in os.listdir(self.directory / "ckpt")):
                return


def blows(count: int, dice: random.Random) -> list[tuple[str, bool, int]]:
    """Yield each of ``count`` kills in order: its target, whether it is during a save, and its rank."""
    kinds = [what for what, share in SHARES.items() for _ in range(share)]
    chosen = [kinds[number * len(kinds) // count] for number in range(count)]
    dice.shuffle(chosen)
    return [(what, dice.random() < 0.5, dice.randrange(RANKS)) for what in chosen]


def run(backend: str, mpi: Sequence[str], count: int, seed: int) -> bool:
    """Run the job undisturbed, and with ``count`` kills; print a table, and return whether the weights are
    the same."""
    dice = random.Random(seed)
    planned = blows(count, dice)
    spares = sum(what == "host" for what, _, _ in planned)
    names = ("login", *(f"node{number}" for number in range(RANKS + spares)))
    with Cluster(names) as cluster, tempfile.TemporaryDirectory(prefix="chaos-") as place:
        (calm := Path(place, "calm")).mkdir()
        quiet = Job(cluster, calm, backend, mpi)
        try:
            code = quiet.end()
            expected = quiet.seen.weights
        finally:
            quiet.kill()
        if code or not expected:
            print("".join(quiet.said), flush=True)
            return False
        (struck := Path(place, "struck")).mkdir()
        job = Job(cluster, struck, backend, mpi)
        began, dealt = time.monotonic(), Counter[tuple[str, bool]]()
        try:
            for attempt, (what, saving, rank) in enumerate(planned):
                if not job.wait(attempt, dice.randint(1, 2 * EVERY - 1)):
                    break
                if saving:
                    job.wait_for_save()
                job.strike(what, rank)
                dealt[what, saving] += 1
            code = job.end()
        finally:
            job.kill()
        seconds = time.monotonic() - began
        same = code == 0 and job.seen.weights == expected
        for what in SHARES:
            between, during = dealt[what, False], dealt[what, True]
            print(f"{backend:5} {what:8} {between:3} between saves  {during:3} during one", flush=True)
        done = sum(dealt.values())
        print(
            f"{backend:5} {done} of {count} blows, {job.seen.attempt} restarts, {seconds:.0f} s; exit {code}, weights "
            f"{job.seen.weights or 'none'}, calm {expected}: {'same' if same else 'WRONG'}",
            flush=True,
        )
        if not same or done < count:
            print(*(line for line in job.said[-60:]), sep="", flush=True)
        return same and done == count


def main(backends: Sequence[str], launcher: str, count: int, seed: int) -> int:
    print(
        f"seed {seed}; {RANKS} ranks on {RANKS} hosts, {STEPS} steps, a checkpoint every {EVERY}", flush=True
    )
    return 0 if all(run(backend, launcher_options(launcher), count, seed) for backend in backends) else 1
