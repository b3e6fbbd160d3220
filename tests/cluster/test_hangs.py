"""Reports on jobs on four hosts that hang, or that one host slows down."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT, bounded, clean_environment, mpi_options
from support.faults import Cluster
from support.hangs import PROGRAM, line_of, shown_in_docs
from support.hung_files import hung_file
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
    """Title and lines of the box of a job whose rank 2 hangs."""
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
def test_a_rank_that_is_late_is_named_with_its_host_and_line(
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


@pytest.mark.parametrize("case", [repeat("crossed"), "stopped", repeat("worker"), repeat("c_lock")])
def test_other_hangs_are_named_on_four_hosts_too(
    case: str, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    title, lines = hang(case, cpulaunch, four, tmp_path)
    assert 2 in stall(tmp_path)["ranks"]
    named = {
        "crossed": "wait for each other in different groups",
        "stopped": "rank 2 on node2: stopped (SIGSTOP)",
        "worker": "rank 2 on node2 has not called all_reduce",
        "c_lock": "rank 2 on node2 has not called all_reduce",
    }
    assert named[case] in title
    assert case != "worker" or any("its process" in line and "read_item" in line for line in lines)
    if case == "c_lock":
        (stacks,) = tmp_path.glob("runs/*/stacks-1.txt")
        assert "lock" in stacks.read_text()


def test_ranks_that_ended_after_calling_the_operation_are_not_blamed(
    cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    """Rank 3 waits for data that rank 2 would forward.  Ranks 0 and 1 wait for no one, and have ended."""
    title, lines = hang("done", cpulaunch, four, tmp_path)
    assert "rank 2 on node2 has not called broadcast #3" in title
    assert lines[0].startswith("rank 3 on node3 waits in broadcast #3 of group 0, 4 kB float32, at train.py:")
    assert stall(tmp_path)["ranks"] == [2]
    assert [rank["status"] for rank in outcome(tmp_path)["ranks"][:2]] == ["exit 0", "exit 0"]


@pytest.mark.repeats
def test_a_disk_that_hangs_is_named_with_its_host(
    cluster: Cluster, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    with hung_file(tmp_path / "disk", lambda argv: cluster.command("node2", argv)) as file:
        hang("disk", cpulaunch, four, tmp_path, "--env", f"HUNG_FILE={file}")
    found = stall(tmp_path)
    assert (found["ranks"], found["text"]) == ([2], f"rank 2 on node2: waits for a disk: read of {file}")


@pytest.mark.repeats
def test_a_rank_that_its_cgroup_throttles_is_named_with_its_host(
    cpulaunch: Run, four: Path, cpu_group: Path, tmp_path: Path
) -> None:
    title, _ = hang("throttled", cpulaunch, four, tmp_path, "--env", f"CPU_GROUP={cpu_group}")
    assert re.search(r"rank 2 on node2: throttled \d+ % by its cgroup", title)
    assert stall(tmp_path)["ranks"] == [2]


@pytest.mark.repeats
def test_a_rank_that_saves_alone_for_twenty_seconds_is_not_reported(
    cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("-f", four, "-ppn", "1", "--stall-timeout", "60", "--env", "SAVES=20")
    done = cpulaunch("run", *options, "train.py", "ccl", "save")
    assert (done.returncode, outcome(tmp_path)["stalls"]) == (0, []), done.stderr
    assert "no progress" not in done.stderr


@pytest.mark.parametrize(
    ("case", "called", "line"),
    [
        ("other_operation", "broadcast #3 of group 0, 4 kB float32", "dist.broadcast("),
        repeat("other_size", "all_reduce #3 of group 0, 8 kB float32", "dist.all_reduce(more)"),
    ],
)
def test_operations_that_differ_are_shown_with_their_hosts(
    case: str, called: str, line: str, cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    """The ranks' own errors report it before the job counts as stalled."""
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("-f", four, "-ppn", "1", "--stall-timeout", "30", "--grace-period", "1")
    done = cpulaunch("run", *options, "train.py", "ccl", case)
    result = outcome(tmp_path)
    assert (done.returncode, result["kind"], result["stalls"]) == (1, "error", []), done.stderr
    note = result["first_failure"]["note"].splitlines()
    there = f"rank 2 on node2: {called}, at train.py:{line_of(line)} {case}"
    # The root of a broadcast needn't wait for the others, and calls the next operation.
    further = f"{called}, which is complete there; now at train.py:{line_of('dist.all_reduce(tensor)')} step"
    assert {there, f"rank 2 on node2: {further}"} & set(note), note
    usual = f"all_reduce #3 of group 0, 4 kB float32, at train.py:{line_of('dist.all_reduce(tensor)')} step"
    assert any(usual in side for side in note), note


def test_differing_roots_are_shown_although_all_ranks_are_in_the_next_operation(
    cpulaunch: Run, four: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("-f", four, "-ppn", "1", "--stall-timeout", "30", "--grace-period", "1")
    done = cpulaunch("run", *options, "train.py", "ccl", "own_root")
    first = outcome(tmp_path)["first_failure"]
    assert (done.returncode, first["disagree"]) == (1, True), done.stderr
    note = first["note"].splitlines()
    assert any(line.startswith("rank 2 on node2: broadcast #3 from rank 2 of group 0") for line in note), note
    # Ranks in the same call share a line.
    of_rank_0 = next(line for line in note if line.startswith(("rank 0 ", "ranks 0-")))
    assert ": broadcast #3 from rank 0 of group 0" in of_rank_0, note


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
def test_two_hosts_report_the_cut_network_between_them(
    ranks_per_host: str, cluster: Cluster, four: Path, tmp_path: Path
) -> None:
    """The other two hosts only wait for these."""
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
    cluster: Cluster, four: Path, cpu_group: Path, tmp_path: Path
) -> None:
    """It computes for one more millisecond in each step, and its control group gives it a twentieth of a CPU."""
    (tmp_path / "steps.py").write_text(STEPS)
    options = ("-f", four, "-ppn", "1", "--heartbeat-timeout", "3", "--env", f"CPU_GROUP={cpu_group}")
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
