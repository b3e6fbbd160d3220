"""Scripts that start processes themselves: one line says what that means in a job of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.command import Run, needs_two_cores

pytestmark = [pytest.mark.slow, needs_two_cores]

GROUP = """
import os, socket, sys, torch, torch.distributed as dist
def work(rank=-1, world=-1, port=None):
    if port:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    os.write(1, f"sum {tensor.item():g}\\n".encode())
    dist.destroy_process_group()
def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
"""
SPAWN = (
    GROUP
    + """
if __name__ == "__main__":
    import torch.multiprocessing as mp
    mp.spawn(work, args=(2, free_port()), nprocs=2)
"""
)
FORK = (
    GROUP
    + """
import torch.multiprocessing as mp
port = free_port()
workers = [mp.get_context("fork").Process(target=work, args=(rank, 2, port)) for rank in range(2)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
"""
)
TORCHRUN = (
    GROUP
    + """
if "inner" in sys.argv:
    work()
else:
    import subprocess
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, "--master-port", str(free_port()), __file__, "inner"], check=True, timeout=100)
"""
)
NOTEBOOK = (
    GROUP
    + """
def train():
    from accelerate import Accelerator
    total = Accelerator().reduce(torch.ones(1)).item()
    os.write(1, f"sum {total:g}\\n".encode())
if __name__ == "__main__":
    from accelerate import notebook_launcher
    notebook_launcher(train, (), num_processes=2, use_port=str(free_port()))
"""
)
ALONE = GROUP + "work(0, 1, free_port())\n"
THE_JOBS = GROUP + "work()\n"

MAKES = "warning: each of the job's 2 ranks makes a process group of {} of its own, so 2 separate models are"
STARTS = (
    "warning: each of the job's 2 ranks starts 2 processes of its own, so 2 separate models are trained; "
)


def run(
    cpulaunch: Run, directory: Path, script: str, ranks: int, *options: str
) -> tuple[list[str], list[str]]:
    """What the processes print, and the lines that say that some are started by the script."""
    (directory / "script.py").write_text(script)
    words: Sequence[object] = ["run", "-n", ranks, "--backend", "gloo", "--tee", "all", *options, "script.py"]
    done = cpulaunch(*words, timeout=120)
    assert done.returncode == 0, done.stderr
    sums = [line.partition("sum ")[2] for line in done.stdout.splitlines() if "sum " in line]
    return sums, [line for line in done.stderr.splitlines() if "of its own" in line]


@pytest.mark.parametrize(
    ("script", "sums", "said"),
    [
        (SPAWN, ["2"] * 4, MAKES.format(2)),
        (FORK, ["2"] * 4, MAKES.format(2)),
        (TORCHRUN, ["2"] * 4, STARTS),
        (NOTEBOOK, ["2"] * 4, STARTS),
        (ALONE, ["1"] * 2, MAKES.format(1)),
    ],
    ids=["spawn", "fork", "torchrun", "notebook_launcher", "alone"],
)
def test_one_line_says_that_each_rank_starts_processes(
    cpulaunch: Run, tmp_path: Path, script: str, sums: list[str], said: str
) -> None:
    found, lines = run(cpulaunch, tmp_path, script, 2)
    assert found == sums
    (line,) = lines
    assert line.startswith(f"[0] cpulaunch: {said}")
    assert "start the script with -n 1, or have `cpulaunch run` start all of its processes" in line


def test_scripts_that_run_as_they_are_written_are_told_too(cpulaunch: Run, tmp_path: Path) -> None:
    assert len(run(cpulaunch, tmp_path, SPAWN, 2, "--as-written")[1]) == 1


@pytest.mark.parametrize("script", [SPAWN, TORCHRUN], ids=["spawn", "torchrun"])
def test_a_rank_alone_may_start_processes(cpulaunch: Run, tmp_path: Path, script: str) -> None:
    assert run(cpulaunch, tmp_path, script, 1) == (["2", "2"], [])


def test_nothing_is_said_of_the_jobs_own_group(cpulaunch: Run, tmp_path: Path) -> None:
    assert run(cpulaunch, tmp_path, THE_JOBS, 2) == (["2", "2"], [])
