"""Reports on jobs that hang, or that a slow host delays, on several hosts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT, bounded, clean_environment, mpi_options
from support.faults import Cluster
from support.hangs import PROGRAM, line_of, shown_in_docs
from support.jobs import box, outcome
from support.marks import repeat

from cluster.conftest import Run
from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

STALLS = ("--stall-timeout", "4", "--stall-action", "abort", "--grace-period", "1")


def hang(case: str, cpulaunch: Run, four: Path, tmp_path: Path, *options: str) -> tuple[str, list[str]]:
    """Run a job whose rank 2 hangs; return the title and lines of the box that reports it."""
    (tmp_path / "train.py").write_text(PROGRAM)
    return box(cpulaunch("run", "-f", four, "-ppn", "1", *STALLS, *options, "train.py", "ccl", case).stderr)


def stall(tmp_path: Path) -> dict:
    result = outcome(tmp_path)
    assert (result["kind"], result["exit_code"]) == ("stalled", 4)
    (found,) = result["stalls"]
    return found


@pytest.mark.parametrize(
    ("backend", "mpi"),
    [("ccl", "intel"), repeat("ccl", "mpich"), repeat("ccl", "openmpi"), repeat("gloo", "openmpi")],
)
def test_a_late_rank_is_named_with_its_host_and_line(
    backend: str, mpi: str, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    wanted = ("-f", four, "-ppn", "1", "--backend", backend, *STALLS, *mpi_options(mpi))
    done = cpulaunch("run", *wanted, "train.py", backend, "late")
    found = stall(tmp_path)
    title, lines = box(done.stderr)
    assert "rank 2 on node2 has not called all_reduce #" in title
    assert lines[0].startswith("all others wait in all_reduce #")
    assert backend == "gloo" or shown_in_docs(done.stderr), done.stderr
    assert (found["ranks"], found["host"], found["line"]) == (
        [2],
        "node2",
        line_of("time.sleep(600)", "def load_batch"),
    )


@pytest.mark.repeats
def test_ranks_that_ended_after_calling_the_operation_are_not_blamed(
    cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    """Rank 3 waits for data that rank 2 has to forward.  Ranks 0 and 1 need no data, and have ended."""
    title, lines = hang("done", cpulaunch, four, tmp_path)
    assert "rank 2 on node2 has not called broadcast #3" in title
    assert lines[0].startswith("rank 3 on node3 waits in broadcast #3 of group 0, 4 kB float32, at train.py:")
    assert stall(tmp_path)["ranks"] == [2]
    assert [rank["status"] for rank in outcome(tmp_path)["ranks"][:2]] == ["exit 0", "exit 0"]


ALL_REDUCE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("ccl")
ones = torch.ones(1_000_000)
number = 0
while True:
    dist.all_reduce(ones)
    if (number := number + 1) == 20 and dist.get_rank() == 0:
        print("up", flush=True)
        while not os.path.exists("cut"):
            time.sleep(0.01)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("ranks_per_host", ["2", repeat("4")])
def test_a_cut_network_between_two_hosts_is_reported_with_both_hosts(
    ranks_per_host: str, cluster: Cluster, four: Path, tmp_path: Path
) -> None:
    """The other two hosts aren't to blame: they only wait for these."""
    (tmp_path / "program.py").write_text(ALL_REDUCE)
    options = ["-f", str(four), "-ppn", ranks_per_host, "--oversubscribe", *STALLS, "program.py"]
    argv = [sys.executable, "-m", "cpulaunch", "run", "--tee", "all", *options]
    environment = clean_environment(LC_ALL="C.UTF-8")
    process = cluster.start("node0", argv, directory=tmp_path, env=environment)
    with bounded(process):
        assert process.stdout
        assert process.stdout.readline() == "[0] up\n"
        with cluster.parted("node1", "node3"):
            (tmp_path / "cut").touch()
            _, errors = process.communicate()
    stall(tmp_path)
    title, _ = box(errors)
    assert "does not complete between node1 and node3" in title, errors
    assert ranks_per_host != "2" or shown_in_docs(errors), errors


STEPS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("ccl")
def enter(group):
    with open(os.path.join(group, "cgroup.procs"), "w") as processes:
        processes.write("0")
group, is_limited = os.environ["CPU_GROUP"], dist.get_rank() == 2
if is_limited:
    enter(group)
weight = torch.nn.Parameter(torch.ones(10))
optimizer = torch.optim.SGD([weight])
left = 50
while left:
    time.sleep(0.01)
    until = time.thread_time() + 0.001
    while is_limited and time.thread_time() < until:
        pass
    weight.grad = torch.full((10,), float(os.path.exists("enough")))
    dist.all_reduce(weight.grad)
    optimizer.step()
    left -= bool(weight.grad.any())
if is_limited:
    enter(os.path.dirname(group))
dist.destroy_process_group()
"""


def test_a_host_that_is_slower_than_the_others_is_named_once(
    cluster: Cluster, cpu_group: Path, tmp_path: Path
) -> None:
    """Its rank computes an extra millisecond per step in a control group with a twentieth of a CPU."""
    (tmp_path / "steps.py").write_text(STEPS)
    options = (
        "--hosts",
        "node0,node1,node2",
        "-ppn",
        "1",
        "--heartbeat-timeout",
        "3",
        "--env",
        f"CPU_GROUP={cpu_group}",
    )
    argv = [sys.executable, "-m", "cpulaunch", "run", *options, "steps.py"]
    process = cluster.start("node0", argv, directory=tmp_path, env=clean_environment(LC_ALL="C.UTF-8"))
    with bounded(process, 2 * TIMEOUT):
        assert process.stderr
        named = (line for line in process.stderr if "slower than the others" in line)
        line = next(named)
        (tmp_path / "enough").touch()
        assert list(named) == []
        assert process.wait() == 0
    times = r"\d+ ms of computing per step, the others \d+ ms, over \d+ steps"
    why = r"its cgroup throttled it \d+ % of the time"
    assert re.fullmatch(rf"cpulaunch: node2 is slower than the others: {times}; {why}\n", line)
    (events,) = tmp_path.glob("runs/*/events.jsonl")
    assert not any(json.loads(each)["type"] == "stall" for each in events.read_text().splitlines())
