"""In a job with several ranks, a script that starts its own processes gets one line about the consequences."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.command import TIMEOUT, Run, bounded, clean_environment, mpi_options, needs_two_cores
from support.marks import repeat

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
    """The processes' output, and the lines about processes that the script starts."""
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
        repeat(TORCHRUN, ["2"] * 4, STARTS),
        repeat(NOTEBOOK, ["2"] * 4, STARTS),
        repeat(ALONE, ["1"] * 2, MAKES.format(1)),
    ],
    ids=["spawn", "torchrun", "notebook_launcher", "alone"],
)
def test_one_line_reports_that_each_rank_starts_processes(
    cpulaunch: Run, tmp_path: Path, script: str, sums: list[str], said: str
) -> None:
    found, lines = run(cpulaunch, tmp_path, script, 2)
    assert found == sums
    (line,) = lines
    assert line.startswith(f"[0] cpulaunch: {said}")
    assert "start the script with -n 1, or have `cpulaunch run` start all of its processes" in line


# The beginning of Intel's examples.
OF_MPI = """
import os, torch.distributed as dist
rank, size = int(os.environ.get("PMI_RANK", 0)), int(os.environ.get("PMI_SIZE", 1))
store = "store" + os.environ["LOCAL_RANK"] if size == 1 else "store"
dist.init_process_group("gloo", "file://" + os.path.abspath(store), rank=rank, world_size=size)
print("sum", dist.get_world_size())
"""


def test_a_script_that_needs_an_mpis_variables_gets_a_hint(cpulaunch: Run, tmp_path: Path) -> None:
    sums, (line,) = run(cpulaunch, tmp_path, OF_MPI, 2)
    assert sums == ["1", "1"]
    assert line.startswith(f"[0] cpulaunch: {MAKES.format(1)}")
    assert line.endswith("takes its rank from a variable such as PMI_RANK needs that MPI: --launcher mpirun")
    assert run(cpulaunch, tmp_path, OF_MPI, 2, *mpi_options("intel")) == (["2", "2"], [])


@pytest.mark.parametrize("script", [repeat(SPAWN), repeat(TORCHRUN)], ids=["spawn", "torchrun"])
def test_a_rank_alone_may_start_processes(cpulaunch: Run, tmp_path: Path, script: str) -> None:
    assert run(cpulaunch, tmp_path, script, 1) == (["2", "2"], [])


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("script", "said"),
    [(SPAWN, 0), (SPAWN.replace('"gloo"', '"nccl"'), 1)],
    ids=["gloo", "nccl"],
)
def test_one_process_reports_the_changes(cpulaunch: Run, tmp_path: Path, script: str, said: int) -> None:
    (tmp_path / "script.py").write_text(script)
    done = cpulaunch("run", "-n", "1", "--backend", "gloo", "script.py", timeout=120)
    lines = [line for line in done.stderr.splitlines() if "changed in this script" in line]
    assert len(lines) == said, done.stderr
    assert all("backend gloo (not nccl)" in line for line in lines)


def test_nothing_is_reported_about_the_jobs_own_group(cpulaunch: Run, tmp_path: Path) -> None:
    assert run(cpulaunch, tmp_path, THE_JOBS, 2) == (["2", "2"], [])
    (log,) = tmp_path.glob("runs/*/rank-0.log")
    assert "changed in this script" not in log.read_text()  # the script requested gloo


# Rank 1 never joins.  It notices that rank 0 waits when the store's port is open.
WAIT = """
import os, socket, time
if os.environ["RANK"] == "1":
    while True:
        with socket.socket() as s:
            if not s.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))):
                break
        time.sleep(0.01)
    print("waits", flush=True)
    time.sleep(1000)
import torch.distributed as dist
dist.init_process_group()
"""


def test_ctrl_c_ends_ranks_that_wait_for_others(tmp_path: Path) -> None:
    """The ranks end at once: TIMEOUT is much shorter than the grace period."""
    (tmp_path / "script.py").write_text(WAIT)
    command = [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--backend", "gloo"]
    launcher = subprocess.Popen(
        [*command, "--grace-period", "3600", "script.py"], cwd=tmp_path, env=clean_environment(), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with bounded(launcher):
        assert launcher.stdout
        assert launcher.stdout.readline() == "[1] waits\n"
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(TIMEOUT) == 130
