"""Real jobs whose ranks leave processes behind: the jobs end with their own exit code, and leave nothing
else."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent.test_leftovers import ANOTHER_USERS_CHILD, needs_root, without_cap_kill
from support.command import TIMEOUT, Run, clean_environment, processes_with
from support.jobs import outcome
from support.marks import by_launcher, repeat
from support.namespaces import until

from cpulaunch.launchers import MPIS


@pytest.fixture
def leftovers(tmp_path: Path) -> Iterator[Path]:
    """A directory in which rank N writes the pid of a process that it leaves behind to N/pid.

    All processes with TEST_LEFT are killed at the end, even if a rank was ended before it could write.
    """
    for rank in "01":
        (tmp_path / rank).mkdir()
    yield tmp_path
    for pid in processes_with(f"TEST_LEFT={tmp_path}"):
        os.kill(pid, signal.SIGKILL)


@needs_root
@pytest.mark.parametrize(
    ("launcher_options", "code"),
    by_launcher(itertools.product(("local", *MPIS), (0, 3)), usual=[("openmpi", 3)]),
    indirect=["launcher_options"],
)
def test_processes_that_may_not_be_signaled_are_named(
    leftovers: Path, launcher_options: list[str], code: int
) -> None:
    program = f"import os\nos.chdir(os.environ['RANK'])\n{ANOTHER_USERS_CHILD}\nsys.exit({code})"
    (leftovers / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--grace-period", "1", *launcher_options, "program.py"],
        cwd=leftovers, env=clean_environment(TEST_LEFT=str(leftovers)), capture_output=True, text=True, timeout=TIMEOUT,
        stdin=subprocess.DEVNULL, preexec_fn=without_cap_kill,
    )  # fmt: skip
    assert done.returncode == code
    named = {line for line in done.stderr.splitlines() if "can't be ended" in line}
    for rank in range(2) if code == 0 else [outcome(leftovers)["first_failure"]["rank"]]:
        pid = (leftovers / str(rank) / "pid").read_text()
        (line,) = [line for line in named if f"rank {rank}: process {pid} (" in line]
        assert line.endswith("user nobody) can't be ended: Operation not permitted")


def test_a_successful_job_that_waits_for_leftovers_prints_one_line(cpulaunch: Run, tmp_path: Path) -> None:
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.execlp('sleep', 'sleep', '299')\n"
    (tmp_path / "leave.py").write_text(program)
    done = cpulaunch("run", "-n", "2", "--grace-period", "2", "leave.py")
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if "left processes running" in line]
    assert line == (
        "cpulaunch: localhost: ranks 0-1: the program has ended but left processes running, which have 2 s to exit: sleep 299"
    )


# The script ends while its loader's workers wait for the next request.
LOADER = """
import os, sys, torch
from torch.utils.data import DataLoader
def main():
    loader = DataLoader(
        torch.arange(100), num_workers=2, multiprocessing_context=sys.argv[1], persistent_workers=True
    )
    batches = iter(loader)
    next(batches)
    print("ready", flush=True)
    if sys.argv[2] == "raise":
        raise ValueError("no such luck")
    os._exit(int(sys.argv[2])) if sys.argv[2] != "return" else None
    main.kept = batches
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("context", "how", "code"),
    [
        ("forkserver", "return", 0),
        ("fork", "0", 0),
        repeat("fork", "return", 0),
        repeat("spawn", "return", 0),
        repeat("forkserver", "0", 0),
        repeat("spawn", "raise", 1),
        repeat("forkserver", "5", 5),
    ],
)
def test_workers_of_a_data_loader_end_with_their_rank(
    cpulaunch: Run, marked: dict[str, str], tmp_path: Path, context: str, how: str, code: int
) -> None:
    (tmp_path / "loader.py").write_text(LOADER)
    before = semaphores()
    environment = {**marked, "TMPDIR": str(tmp_path)}  # the fork server leaves its socket there
    done = cpulaunch("run", "-n", "1", "--grace-period", "1", "loader.py", context, how, env=environment)
    assert (done.returncode, done.stdout) == (code, "ready\n"), done.stderr
    until(lambda: semaphores() <= before, "semaphores to be removed")  # other tests may have left some


def test_a_rank_that_raised_and_waits_for_its_processes_has_failed(
    cpulaunch: Run, marked: dict[str, str], tmp_path: Path
) -> None:
    """Python waits for its child processes at exit, so the launcher has to end the rank."""
    (tmp_path / "waits.py").write_text(
        "import multiprocessing, time\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.get_context('spawn').Process(target=time.sleep, args=(300,)).start()\n"
        "    raise ValueError('no such luck')\n"
    )
    done = cpulaunch("run", "-n", "1", "waits.py", env=marked)
    assert done.returncode == 1
    assert "ValueError: no such luck" in done.stderr
    assert [rank["status"] for rank in outcome(tmp_path)["ranks"]] == ["raised ValueError, ended by launcher"]


def semaphores() -> set[str]:
    """The names of the semaphores of Python's multiprocessing on this host."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("sem.mp-")}
