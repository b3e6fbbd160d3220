"""Jobs of real ranks that hang: the ranks and places in the report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.command import REPOSITORY, Run
from support.hangs import PAGES, Hang, boxes, line_of, stall
from support.hung_files import hung_file
from support.jobs import box, outcome
from support.marks import repeat

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_a_rank_that_is_late_is_named_with_its_line(
    backend: str, cpulaunch: Run, built, marked, tmp_path: Path
) -> None:
    """The ranks run examples/hang.py."""
    example = REPOSITORY / "examples/hang.py"
    options = ("--backend", backend, "--stall-timeout", "3", "--stall-action", "abort")
    done = cpulaunch("run", "-n", "2", *options, example, "--late", "1", env=marked)
    title, lines, found = stall(tmp_path, done, in_docs=backend == "ccl")
    assert "rank 1 on localhost has not called all_reduce #" in title
    code = example.read_text().splitlines()
    others, at = (
        1 + next(number for number, line in enumerate(code) if text in line)
        for text in ("dist.all_reduce(", "time.sleep(")
    )
    assert f"at hang.py:{others} main" in lines[0]
    assert f"hang.py:{at} load_batch" in lines[1]
    assert (found["ranks"], found["operation"]) == ([1], "all_reduce")
    assert (found["host"], found["file"], found["line"]) == ("localhost", str(example), at)
    first = outcome(tmp_path)["first_failure"]
    assert (first["rank"], first["file"], first["line"]) == (1, str(example), at)
    assert first["text"] is None  # the rank still runs when the launcher ends it
    (events,) = tmp_path.glob("runs/*/events.jsonl")
    (logged,) = [
        entry for line in events.read_text().splitlines() if (entry := json.loads(line))["type"] == "stall"
    ]
    assert {key: logged[key] for key in found if key != "seconds"} == {
        k: v for k, v in found.items() if k != "seconds"
    }
    assert logged["seconds"] > logged["lasted"] == found["seconds"]
    (stacks,) = tmp_path.glob("runs/*/stacks-1.txt")
    assert "load_batch" in stacks.read_text()


@pytest.mark.repeats
@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_a_rank_that_computes_meanwhile_is_not_reported_as_waiting(
    backend: str, hang: Hang, tmp_path: Path
) -> None:
    title, lines, found = stall(tmp_path, hang("asynchronous", backend=backend))
    assert "rank 1 on localhost has not called all_reduce #3" in title
    started = "rank 0 on localhost has started all_reduce #3 of group 0, 4 kB float32, and is at train.py:"
    assert re.fullmatch(rf"{re.escape(started)}\d+ compute", lines[0])
    assert found["ranks"] == [1]


@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_crossed_groups_are_shown_with_both_lines(backend: str, hang: Hang, tmp_path: Path) -> None:
    title, lines, _ = stall(tmp_path, hang("crossed", backend=backend), in_docs=backend == "ccl")
    assert "ranks 0-1 on localhost wait for each other in different groups" in title
    for text in ('groups["culprit"]', 'groups["other"]'):
        assert f"train.py:{line_of(text)} crossed" in "\n".join(lines)


@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_a_rank_that_makes_a_group_alone_and_the_others_are_shown_with_their_lines(
    backend: str, hang: Hang, tmp_path: Path
) -> None:
    title, lines, found = stall(tmp_path, hang("new_group", backend=backend), in_docs=backend == "ccl")
    assert title.endswith("rank 1 on localhost waits in new_group, rank 0 on localhost in all_reduce #3")
    at = line_of("dist.new_group()", "def make_group")
    assert lines[0].startswith(f"rank 1 on localhost waits in new_group of ranks 0-1, at train.py:{at} ")
    at = line_of("dist.all_reduce(tensor)")
    assert lines[1].startswith("rank 0 on localhost waits in all_reduce #3 of group 0, 4 kB float32, at ")
    assert lines[1].endswith(f"train.py:{at} step")
    first = outcome(tmp_path)["first_failure"]
    assert (first["rank"], first["ranks"], found["ranks"]) == (None, [0, 1], [0, 1])


@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_an_error_about_a_rank_that_has_ended_has_this_rank_in_its_headline(
    backend: str, cpulaunch: Run, hang: Hang, tmp_path: Path
) -> None:
    done = hang("finished", "--stall-timeout", "30", backend=backend)
    first = outcome(tmp_path)["first_failure"]
    text = "rank 1 on localhost has left (exit 0) without calling all_reduce #3"
    assert (done.returncode, first["rank"], first["ranks"], first["text"]) == (1, 0, [1], text), done.stderr
    title, lines = box(done.stderr)
    at = f"train.py:{line_of('dist.all_reduce(tensor)')} step"
    assert title == text
    assert lines[0] == f"rank 0 on localhost: all_reduce #3 of group 0, 4 kB float32, at {at}"
    assert "rank 0 on localhost failed then:" in lines
    assert text in cpulaunch("jobs").stdout


def test_a_worker_of_a_data_loader_is_shown(hang: Hang, tmp_path: Path) -> None:
    title, lines, _ = stall(tmp_path, hang("worker"), in_docs=True)
    assert "rank 1 on localhost has not called all_reduce" in title
    assert any(
        "its process" in line and f"train.py:{line_of('time.sleep', 'def read_item')} read_item" in line
        for line in lines
    )


def test_stopped_and_debugged_ranks_are_recognized(hang: Hang, tmp_path: Path) -> None:
    done = hang("held", "-n", "4", "--oversubscribe")
    title, lines, found = stall(tmp_path, done, in_docs=True)
    assert "rank 1 on localhost: stopped (SIGSTOP)" in title
    (debugger,) = [line for line in lines if "a debugger (pid" in line]
    assert re.fullmatch(r"  a debugger \(pid \d+, python[\d.]*\) holds it", debugger)
    assert "  at the prompt of pdb" in lines
    assert found["ranks"] == [1, 2, 3]


@pytest.mark.repeats
def test_the_rank_with_the_store_may_be_stopped_for_a_long_time(hang: Hang, tmp_path: Path) -> None:
    done = hang("stopped_for_a_while", "--stall-action", "report")
    assert done.returncode == 0, done.stderr
    title, *lines = boxes(done.stderr)[0]
    assert title == "no progress for N s: rank 0 on localhost: stopped (SIGSTOP)"
    assert lines[0].startswith("rank 1 on localhost waits in all_reduce #1 of group ")
    assert outcome(tmp_path)["stalls"][0]["ranks"] == [0]
    assert "the sum is 4.0" in done.stdout


def test_a_hanging_disk_is_reported(hang: Hang, tmp_path: Path) -> None:
    with hung_file(tmp_path / "disk") as file:
        _, lines, found = stall(tmp_path, hang("disk", HUNG_FILE=str(file)))
    assert found["text"] == f"rank 1 on localhost: waits for a disk: read of {file}"
    at = f"is at train.py:{line_of('file.read(1)')} read_file"
    assert any(line.endswith(at) for line in lines), lines
    assert found["ranks"] == [1]


def test_a_rank_that_its_cgroup_throttles_is_reported_as_throttled(
    hang: Hang, cpu_group: Path, tmp_path: Path
) -> None:
    title, lines, found = stall(tmp_path, hang("throttled", CPU_GROUP=str(cpu_group)))
    assert re.search(r"rank 1 on localhost: throttled \d+ % by its cgroup", title)
    assert "compute" in lines[1]
    assert found["ranks"] == [1]


def test_a_lock_in_c_is_shown_in_the_stack(hang: Hang, tmp_path: Path) -> None:
    title, _, _ = stall(tmp_path, hang("c_lock"), in_docs=True)
    assert "rank 1 on localhost has not called all_reduce" in title
    (stacks,) = tmp_path.glob("runs/*/stacks-1.txt")
    assert "lock" in stacks.read_text()


def test_a_deadlock_of_two_threads_is_shown_with_their_lines(hang: Hang, tmp_path: Path) -> None:
    title, lines, _ = stall(tmp_path, hang("dead_lock"), in_docs=True)
    assert "rank 1 on localhost" in title
    for line in (line_of("two.acquire()", "while not"), line_of("one.acquire()", "def other_thread")):
        assert any("waits for a lock at" in text and f"train.py:{line} " in text for text in lines), lines


def test_a_report_does_not_wait_for_an_agent_and_progress_is_reported_later(
    hang: Hang, tmp_path: Path
) -> None:
    """The rank's agent is stopped until the report is there."""
    done = hang("goes_on", "--stall-action", "report")
    assert done.returncode == 0, done.stderr
    # Ending the ranks may take as long on a busy machine, and would count as a stall, too.
    title, *lines = boxes(done.stderr)[0]
    assert "rank 1 on localhost can't be seen; the others wait in all_reduce #3" in title
    assert lines[1] == "rank 1 on localhost can't be seen: its agent has not answered"
    assert done.stderr.count("cpulaunch: the job goes on (--stall-action report); Ctrl-C ends it") == 1
    assert re.search(r"cpulaunch: the job continues, after \d+ s without progress\n", done.stderr)
    assert outcome(tmp_path)["stalls"][0]["seconds"] >= 3


@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_a_wait_before_the_first_step_is_reported_and_not_ended(
    backend: str, hang: Hang, tmp_path: Path
) -> None:
    """The rank continues when the report exists."""
    done = hang("unmet", backend=backend)
    assert done.returncode == 0, done.stderr
    title, *lines = boxes(done.stderr)[0]
    name = "init_process_group"
    assert title == f"no progress for N s, before the first step: rank 1 on localhost has not called {name}"
    assert lines[0].startswith(f"rank 0 on localhost waits in {name}, at train.py:")
    assert f"is at train.py:{line_of('time.sleep(0.05)', 'def download')} download" in lines[1]
    assert (
        lines[2] == "before the first step, --stall-action abort ends the job once rank 1 uses no CPU for N s"
    )
    assert boxes(done.stderr)[0] in boxes(PAGES)
    found = outcome(tmp_path)["stalls"][0]
    assert found["ranks"] == [1]
    assert "--stall-action" not in found["note"]
    assert found["advice"].startswith("before the first step, --stall-action abort ends the job once ")


@pytest.mark.repeats
def test_a_rank_that_saves_alone_is_not_reported(hang: Hang, tmp_path: Path) -> None:
    done = hang("save", "--stall-timeout", "10")
    assert (done.returncode, outcome(tmp_path)["stalls"]) == (0, []), done.stderr
    assert "no progress" not in done.stderr


def test_a_program_without_a_ledger_is_reported_with_a_fixed_timeout(
    hang: Hang, cpulaunch: Run, tmp_path: Path
) -> None:
    settings = ("--stall-timeout", "2", "--stall-action", "abort")
    program = ("sh", "-c", "sleep 600; true")
    done = cpulaunch("run", "-n", "2", *settings, "--backend", "gloo", "--no-python", *program)
    title, lines, found = stall(tmp_path, done)
    assert "all ranks are" in title
    assert "no ledger: the program isn't run as Python" in lines[0]
    assert (found["file"], found["line"]) == (None, None)
    assert re.fullmatch(r"  its process \d+: sleep 600; .*(sleeping|at ).*", lines[2])


def test_finished_programs_are_ended_with_a_message(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import threading, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
    )
    options = (
        "-n",
        "2",
        "--backend",
        "gloo",
        "--stall-timeout",
        "2",
        "--stall-action",
        "abort",
        "--grace-period",
        "1",
    )
    done = cpulaunch("run", *options, "train.py")
    assert done.returncode == 0, done.stderr
    assert (
        "cpulaunch: ending ranks 0-1: the scripts have finished, but the processes do not exit" in done.stderr
    )
    (events,) = tmp_path.glob("runs/*/events.jsonl")
    said = map(json.loads, events.read_text().splitlines())
    ends = [(each["code"], each["by_launcher"], each["finished"]) for each in said if each["type"] == "exit"]
    assert ends == [(0, True, True)] * 2
