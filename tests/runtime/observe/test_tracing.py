"""Real ranks are traced: from the start, and while they run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT, Run, bounded, clean_environment
from support.jobs import job
from support.marks import repeat
from support.traced import PROGRAM, check, events_of

from cpulaunch.report.findings import findings
from cpulaunch.report.numbers import Numbers
from cpulaunch.report.read import read_job

pytestmark = pytest.mark.slow


@pytest.fixture
def env(marked: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment with a separate directory for temporary files."""
    (tmp_path / "tmp").mkdir()
    return {**marked, "TMPDIR": str(tmp_path / "tmp")}


def left_in(directory: Path) -> list[Path]:
    """Return the files that should have been removed; torch's own directories don't count."""
    return list(directory.glob("cpulaunch-*"))


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("runs/*/trace*"))


def found_first(job: Path) -> str:
    """Return the first finding of the job's report, which uses only telemetry."""
    return findings(Numbers(read_job(job)))[0].text


@pytest.mark.parametrize(
    ("backend", "case", "says", "reported"),
    [
        ("ccl", "slow loader", "waiting for input: set num_workers > 0", "waiting for input: more workers"),
        repeat(
            "gloo",
            "slow rank",
            "waiting for slower ranks: rank 1 on localhost: it is in Python, or idle,",
            "waiting for slower ranks: rank 1 on localhost takes 1",
        ),
    ],
)
def test_steps_from_the_start(
    backend: str,
    case: str,
    says: str,
    reported: str,
    cpulaunch: Run,
    built,
    env: dict[str, str],
    tmp_path: Path,
) -> None:
    """The program ends right after these steps.

    The cause of its slowness is the first finding of the trace and of the report.
    """
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("-n", "2", "--backend", backend, "--profile", "4-6")
    done = cpulaunch("run", *options, "train.py", backend, case, "6", env=env)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == ["trace.json.gz", "trace.summary.json", "trace.txt"]
    assert left_in(tmp_path / "tmp") == []
    (trace,) = tmp_path.glob("runs/*/trace.json.gz")
    assert check(events_of(trace), 2, backend=backend) == ["step 4", "step 5", "step 6"]
    lines = trace.with_name("trace.txt").read_text().splitlines()
    assert says in lines[2]
    assert f"trace, with more findings beside it: {trace}\n" in done.stderr
    assert f"cpulaunch: {lines[2]}\n" in done.stderr
    assert "profiler_start" not in done.stderr
    assert reported in found_first(trace.parent)


@pytest.mark.repeats
def test_a_throttled_rank_is_named_first(
    cpulaunch: Run, env: dict[str, str], tmp_path: Path, cpu_group: Path
) -> None:
    """When the rank begins to train, it enters a control group with a twentieth of a CPU."""
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("-n", "2", "--backend", "gloo", "--profile", "4-23")
    env["GROUP"] = str(cpu_group / "cgroup.procs")
    done = cpulaunch("run", *options, "train.py", "gloo", "throttled", "40", env=env, timeout=2 * TIMEOUT)
    assert done.returncode == 0, done.stderr
    (text,) = tmp_path.glob("runs/*/trace.txt")
    lost = r"\d\d % of the time of rank 1 on localhost is lost to the CPU quota of its control group"
    assert re.search(lost, text.read_text().splitlines()[2])
    assert re.match(lost, found_first(text.parent))


TRACES_ITSELF = """
import torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def steps(count):
    for _ in range(count):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
steps(5)
with profile(activities=[ProfilerActivity.CPU]) as own:
    steps(3)
print(len(own.events()) > 0, torch.autograd.profiler._enable_profiler.__module__)
dist.destroy_process_group()
"""


def test_a_script_that_starts_torchs_profiler_is_not_traced(
    cpulaunch: Run, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRACES_ITSELF)
    done = cpulaunch("run", "-n", "2", "--backend", "gloo", "--profile", "4-20", "train.py", env=env)
    assert done.returncode == 0, done.stderr
    assert "cpulaunch: no trace: ranks 0-1: the program has started torch's profiler itself\n" in done.stderr
    assert "True torch._C._autograd\n" in done.stdout  # the script's trace, and torch's function again
    assert not list(tmp_path.glob("runs/*/trace.json.gz"))


RESTARTS = """
import os, pathlib, time, torch, torch.distributed as dist
from cpulaunch.runtime.reports import resumed_from
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
begins, dies = ((0, 7), (4, 11), (11, 99))[attempt]
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
if begins:
    resumed_from(begins)
for step in range(begins + 1, 15):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if step == dies:
        while attempt == 1 and not list(pathlib.Path("runs").glob("*/trace.txt")):
            time.sleep(0.05)
        os.kill(os.getpid(), 9)
"""


def test_a_restarted_job_traces_its_steps_once(cpulaunch: Run, env: dict[str, str], tmp_path: Path) -> None:
    """The first attempt dies within the traced steps (counted from the job's start); the second makes them.

    The model's FLOPs aren't counted in these steps, which would lengthen the second attempt's third step.
    """
    (tmp_path / "train.py").write_text(RESTARTS)
    options = ("-n", "2", "--backend", "gloo", "--profile", "6-8", "--max-restarts", "2")
    done = cpulaunch("run", *options, "train.py", env=env, timeout=3 * TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == ["trace.json.gz", "trace.summary.json", "trace.txt"]
    assert left_in(tmp_path / "tmp") == []
    (trace,) = tmp_path.glob("runs/*/trace.json.gz")
    assert check(events_of(trace), 2, backend="gloo") == ["step 6", "step 7", "step 8"]
    rows = [json.loads(line) for line in trace.with_name("telemetry.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "flops" in row and row["rank"] == 0] == [3, 9, 14]


def asking(env: dict[str, str], tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start ``cpulaunch profile``."""
    return subprocess.Popen(
        [sys.executable, "-m", "cpulaunch", "profile", *arguments],
        cwd=tmp_path,
        env=clean_environment(**env),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def reads(asked: subprocess.Popen[str], begin: str) -> str:
    """Read stderr up to a line that begins with ``begin``; return the lines before it."""
    assert asked.stderr
    before = ""
    while not (line := asked.stderr.readline()).startswith(f"cpulaunch: {begin}"):
        assert line, f"it ended before {begin!r}: {before}"
        before += line
    return before


def test_steps_of_a_running_job(env: dict[str, str], tmp_path: Path) -> None:
    """Trace steps of all ranks, and of one rank.

    A request that fails reports the reason.  A rank that is killed during the trace leaves no file.
    """
    with job(tmp_path, env, ["--backend", "gloo"], PROGRAM):
        said = {}
        for ranks in ("0-1", "1", "0-7"):
            with bounded(
                asking(env, tmp_path, "--steps", "3", "--ranks", ranks, "-o", f"{ranks}.gz")
            ) as asked:
                said[ranks] = (*asked.communicate(timeout=TIMEOUT), asked.returncode)
        assert (said["0-1"][2], said["1"][2]) == (0, 0), said
        assert len(check(events_of(tmp_path / "0-1.gz"), 2, backend="gloo")) == 3
        assert {event["pid"] for event in events_of(tmp_path / "1.gz")} == {2}
        assert " of 2 ranks: " in said["0-1"][0]
        assert "no trace was written: there is no rank 7: the ranks are 0 to 1" in said["0-7"][1]
        with bounded(asking(env, tmp_path, "--steps", "1000")) as interrupted:
            (place,) = tmp_path.glob("runs/*")
            assert reads(interrupted, "tracing steps ") == f"cpulaunch: profile of {place}\n"
            interrupted.send_signal(signal.SIGINT)
            why = interrupted.communicate(timeout=TIMEOUT)[1]
            assert why == "cpulaunch: interrupted: no trace is written, and the job continues\n"
            assert interrupted.returncode == 130
        with bounded(asking(env, tmp_path, "--steps", "1000")) as first:
            reads(first, "tracing steps ")
            with bounded(asking(env, tmp_path)) as second:
                assert "another trace of this job is running" in second.communicate(timeout=TIMEOUT)[1]
            (tmp_path / "die").touch()
            _, why = first.communicate(timeout=TIMEOUT)
        assert first.returncode == 3
        assert "no trace was written: ranks 0-1: its program exited before the last traced step" in why
    assert files(tmp_path) == [
        f"trace{number}{end}" for number in ("-2", "") for end in (".json.gz", ".summary.json", ".txt")
    ]
    assert left_in(tmp_path / "tmp") == []


DIES_ONCE = """
import os, pathlib, time, torch, torch.distributed as dist
from cpulaunch.runtime.reports import resumed_from
again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
if again:
    resumed_from(1_000_000)
print("ready", flush=True)
while not pathlib.Path("go").exists():
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    if not again and dist.get_rank() == 1 and pathlib.Path("die").exists():
        os.kill(os.getpid(), 9)
"""


@pytest.mark.repeats
def test_a_job_restarted_during_a_trace_can_be_traced_again(
    cpulaunch: Run, env: dict[str, str], tmp_path: Path
) -> None:
    """The waiting command reports the end of the program.

    The next attempt's steps continue from the saved state.
    """
    with job(tmp_path, env, ["--backend", "gloo", "--max-restarts", "1"], DIES_ONCE) as launcher:
        assert launcher.stdout
        with bounded(asking(env, tmp_path, "--steps", "1000")) as first:
            reads(first, "tracing steps ")
            (tmp_path / "die").touch()
            assert "its program exited before the last traced step" in first.communicate(timeout=TIMEOUT)[1]
        assert {launcher.stdout.readline() for _ in "01"} == {"[0] ready\n", "[1] ready\n"}
        with bounded(asking(env, tmp_path, "--steps", "2")) as second:
            said, why = second.communicate(timeout=TIMEOUT)
        assert second.returncode == 0, why
        first_step, next_step = check(events_of(*tmp_path.glob("runs/*/trace.json.gz")), 2, backend="gloo")
        number = int(first_step.removeprefix("step "))
        assert number > 1_000_000
        assert next_step == f"step {number + 1}"
        assert f"steps {number} to {number + 1} of 2 ranks" in said
        assert re.search(r" 1 restart · 1,?000,?\d+ steps", cpulaunch("jobs", env=env).stdout)
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0
    assert left_in(tmp_path / "tmp") == []


def test_programs_without_steps_can_not_be_traced(env: dict[str, str], tmp_path: Path) -> None:
    """Neither a program without torch nor a program without an optimizer has steps."""
    program = """
import pathlib, time, os
if os.environ["RANK"] == "1":
    import torch
print("ready", flush=True)
while not pathlib.Path("go").exists(): time.sleep(0.1)
"""
    with job(tmp_path, env, [], program) as launcher:
        why = []
        for rank in "01":
            with bounded(asking(env, tmp_path, "--ranks", rank)) as asked:
                why.append(asked.communicate(timeout=TIMEOUT)[1])
        assert "rank 0 can't be traced yet: its program hasn't imported torch (while it starts, ask" in why[0]
        assert "rank 1 can't be traced yet: it hasn't created an optimizer of torch" in why[1]
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0


@pytest.mark.repeats
@pytest.mark.parametrize("window", ["10-12", repeat("2-12")])
def test_a_job_that_ends_before_the_last_step_to_trace_has_a_trace(
    window: str, cpulaunch: Run, env: dict[str, str], tmp_path: Path
) -> None:
    """The same holds for a job that ends before the first step to trace.

    Programs crashed at their end if torch's profiler was still on.
    """
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("-n", "2", "--backend", "gloo", "--profile", window)
    done = cpulaunch("run", *options, "train.py", "gloo", "", "3", env=env)
    assert done.returncode == 0, done.stderr
    assert "no trace: ranks 0-1: its program exited before the last traced step" in done.stderr
    assert files(tmp_path) == []
    assert left_in(tmp_path / "tmp") == []
