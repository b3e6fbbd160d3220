"""Checkpoints: a resumed training equals an uninterrupted one, bit for bit, and no checkpoint is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import (
    REPOSITORY,
    Run,
    bounded,
    clean_environment,
    intel_python,
    needs_bf16,
    processes_with,
)
from support.jobs import box, outcome
from support.marks import repeat
from support.namespaces import until

PROGRAMS = Path(__file__).with_name("programs_checkpoint.py")
EXAMPLE = REPOSITORY / "examples" / "checkpoint.py"
LIMIT = 150.0


def alone(directory: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program without a launcher, after the commands ``before`` in its own mount namespace."""
    command = [sys.executable, str(PROGRAMS), *arguments]
    if before:
        command = ["unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh", *command]
    return subprocess.run(command, cwd=directory, env=clean_environment(), capture_output=True, text=True,
                          timeout=LIMIT, stdin=subprocess.DEVNULL)  # fmt: skip


def launch(directory: Path, *arguments: object, **env: str) -> subprocess.Popen[str]:
    """Start a job on two ranks."""
    argv = [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--oversubscribe", *map(str, arguments)]
    return subprocess.Popen(argv, cwd=directory, env=clean_environment(**env), text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def result(output: str) -> Any:
    return json.loads(re.findall(r"RESULT (\{.*\})", output)[0])


def complete(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step-*") if path.suffix == "")


def test_training_resumes_bit_for_bit_with_any_loader(tmp_path: Path) -> None:
    """The model has dropout, and the data has random numbers of torch, NumPy and Python.  Trainings resume
    within an epoch and at its end."""
    done = alone(tmp_path, "continued")
    assert done.returncode == 0, done.stderr
    found = result(done.stdout)
    assert found.pop("finished") == [True, 0]
    over = f"cpulaunch: {tmp_path}/finished holds the finished run at step 40: nothing is left to do; use another"
    assert done.stderr.count(over) == 1
    assert len(found) == 15
    wrong = {name: each for name, each in found.items() if each not in ([True, 13], [True, 10])}
    assert not wrong


def test_a_kill_within_a_save_loses_no_checkpoint(tmp_path: Path) -> None:
    """The kill comes while files are written, before and after the directory is renamed, or while an old one
    is removed."""
    calm = result(alone(tmp_path, "killed", "calm").stdout)
    left = {
        "writing-10": ["step-5"],
        "before-15": ["step-10", "step-5"],
        "after-20": ["step-10", "step-15", "step-20"],
        "removing-15": ["step-20", "step-25"],
    }
    struck = alone(tmp_path, "killed", "struck", *left)
    assert result(struck.stdout) == {"weights": calm["weights"], "first": 25, "left": left}, struck.stderr
    assert "cpulaunch: resuming after step 25 from " in struck.stderr
    assert sorted(path.name for path in (tmp_path / "struck").iterdir()) == [".lock", "step-30", "step-35"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_reported_and_loses_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    done = alone(tmp_path, "full", "disk", before="mount -t tmpfs -o size=400k tmpfs disk")
    assert done.returncode == 0, done.stderr
    kept = ["step-5"]
    assert result(done.stdout) == {"5": kept, "10": kept, "15": kept, "20": ["step-20", "step-5"]}
    lines = [line for line in done.stderr.splitlines() if line]
    assert [line.partition(": ")[2] for line in lines] == [
        f"the checkpoint of step {step} was not saved: No space left on device; "
        f"{tmp_path}/disk/step-5 stays the last one"
        for step in (10, 15)
    ]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_read(
    cpulaunch: Run, tmp_path: Path
) -> None:
    """Only the second rank reads the damaged file, but both resume from the same step."""
    done = run_job(cpulaunch, "-n", "2", PROGRAMS, "damaged", "ckpt")
    found = [json.loads(each) for each in re.findall(r"RESULT (\{.*\})", done.stdout)]
    assert len(found) == 2
    left = ["step-1", "step-2", "step-3", "step-4.damaged"]
    reasons = {
        "data truncated": r"__1_0.distcp has \d+ of \d+ bytes",
        "data missing": "__1_0.distcp is missing",
        "data garbled": r".+ \(rank 1\)",
        "facts missing": "checkpoint.json is missing",
        "facts truncated": "checkpoint.json can't be read: .+",
        "metadata missing": ".metadata is missing",
        "metadata truncated": ".metadata can't be read: .+",
    }
    for own in found:
        text, hint = own.pop("all")
        missing = "; ".join(f"step-{step}: checkpoint.json is missing" for step in (4, 3, 2, 1))
        assert text == f"no checkpoint in {tmp_path}/all can be read: {missing}"
        assert hint
        assert own.pop("two") == [2, True, ["step-1", "step-2", "step-3.damaged", "step-4.damaged"]]
        assert own == {name: [3, True, left] for name in reasons}
    for name, reason in reasons.items():
        path = re.escape(str(tmp_path / name.replace(" ", "-")))
        said = f"cpulaunch: {path}/step-4 is damaged: {reason}; it is now step-4.damaged, and the run resumes after"
        assert len(re.findall(f"{said} step 3\n", done.stderr)) == 1, (name, done.stderr)
    assert len(re.findall("is damaged: .*after step 2\n", done.stderr)) == 2
    assert "Traceback" not in done.stderr


def test_checkpoints_that_do_not_fit_are_refused_with_a_line(tmp_path: Path) -> None:
    done = alone(tmp_path, "refused", "ckpt")
    assert done.returncode == 0, done.stderr
    said = {
        name: (re.sub(re.escape(str(tmp_path)) + "/", "", text), hint)
        for name, (text, hint) in result(done.stdout).items()
    }
    texts = {name: text for name, (text, _) in said.items()}
    other = "ckpt/step-1 doesn't fit this script: "
    assert texts == {
        "every": "Checkpoint: every is 'often': expected a number of steps such as 500, or a time such as 90s, "
        "10m or 2h",
        "keep": "Checkpoint: keep must be an integer of at least 1, got 0",
        "scheduler": "Checkpoint: a scheduler has no state_dict and load_state_dict",
        "optimizer": "Checkpoint: each optimizer must be of type Optimizer, got Sequential",
        "loader": "Checkpoint.steps: no data loader was passed: steps(loader, epochs=3)",
        "directory": "file/below can't be written: Not a directory",
        "file": "file is a file, not a directory",
        "no directory": "Checkpoint: the directory has no name",
        "no model": "Checkpoint: each model must be of type Module, got NoneType",
        "no loader": "Checkpoint: loader must be a data loader, got int",
        "epochs": "Checkpoint.steps: epochs must be at least 0, got -1",
        "which step": "Checkpoint.save: the number of completed steps is unknown",
        "another optimizer": "other/step-5 doesn't fit this script: it was saved with SGD, and this script has AdamW",
        "names": f"{other}it has no weight",
        "shapes": f"{other}0.weight has the shape 16×8 in it, and 9×8 in this script",
        "optimizers": f"{other}it holds 0 optimizers and 0 schedulers, and this script has 1 optimizer and 0 schedulers",
        "version": "ckpt/step-1 was written by another version of cpulaunch (schema 0, not 1)",
    }
    with_hints = ("which step", "another optimizer", "directory", "names", "shapes", "optimizers", "version")
    assert all(said[name][1] for name in with_hints)


def test_a_deleted_directory_is_reported_at_each_save(tmp_path: Path) -> None:
    done = alone(tmp_path, "gone", "disk")
    assert done.returncode == 0, done.stderr
    lost = "cpulaunch: the checkpoint of step 2 was not saved: Not a directory; there is none before it\n"
    assert done.stderr.count(lost) == 1, done.stderr


def test_a_script_that_ignores_a_checkpoint_gets_one_warning(tmp_path: Path) -> None:
    done = alone(tmp_path, "unread", "ckpt")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"cpulaunch: {tmp_path}/ckpt/step-2 exists, but was not loaded: to resume from it, call resume() "
        "before the first step"
    ]


def test_one_job_at_a_time_writes_into_a_directory(tmp_path: Path) -> None:
    """The second job waits for the first one, and names it.  The first one's ranks may have no launcher."""
    first = subprocess.Popen([sys.executable, PROGRAMS, "holds", "ckpt"], cwd=tmp_path, env=clean_environment(),
                             text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    with bounded(first, LIMIT):
        assert first.stdout
        assert first.stdin
        assert first.stdout.readline() == "holds\n"
        who = f"process {first.pid} on {socket.gethostname()}"
        done = alone(tmp_path, "refused_lock", "ckpt")
        assert result(done.stdout) == {
            "error": f"{tmp_path}/ckpt is in use: {who} writes its checkpoints there",
            "hint": "end it, or use another directory for this job",
        }
        waits = f"cpulaunch: {tmp_path}/ckpt is in use by {who}: waiting for its end, for 0 s at most\n"
        assert done.stderr.count(waits) == 1
        first.kill()
        first.wait()
    assert result(alone(tmp_path, "refused_lock", "ckpt").stdout) == {"error": "", "hint": ""}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_directory_on_a_full_disk_can_be_locked(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    full = "mount -t tmpfs -o size=4k tmpfs disk && head -c 4096 /dev/zero > disk/rest"
    done = alone(tmp_path, "refused_lock", "disk", before=full)
    assert result(done.stdout) == {"error": "", "hint": ""}, done.stderr


@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_save_and_end(tmp_path: Path, marked: dict[str, str]) -> None:
    launcher = launch(tmp_path, "--checkpoint-every", "10h", EXAMPLE, "--steps", 1000000, **marked)
    with bounded(launcher, LIMIT):
        assert launcher.stdout
        assert any("step 50:" in line for line in launcher.stdout)
        launcher.kill()
        until(lambda: not processes_with(f"TEST_MARK={tmp_path}"), "the ranks to end", LIMIT)
    assert len(complete(tmp_path / "ckpt")) == 1


def run_job(cpulaunch: Run, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = cpulaunch("run", "--oversubscribe", "--tee", "all", *arguments, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_a_job_with_a_killed_rank_ends_with_the_weights_of_an_undisturbed_job(
    cpulaunch: Run, tmp_path: Path, backend: str
) -> None:
    """On three ranks, where sums depend on DDP's buckets, with prepare's EpochSampler and a worker for
    data. A rank that is stuck outside a collective doesn't get its grace period to save."""
    (tmp_path / "struck.py").write_text(
        "import os, runpy, signal, sys, time, torch\n"
        "from torch.optim.optimizer import register_optimizer_step_post_hook\n"
        "first, steps = os.environ['CPULAUNCH_RESTART_COUNT'] == '0', []\n"
        "def stepped(*_):\n"
        "    steps.append(0)\n"
        "    if not first or len(steps) != 47: return\n"
        "    if os.environ['RANK'] == '0': time.sleep(600)\n"
        "    while os.environ['RANK'] == '2':\n"
        "        if os.path.exists('struck/step-20'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "register_optimizer_step_post_hook(stepped)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    options = ("-n", "3", "--oversubscribe", "--backend", backend, "--checkpoint-every", "20",
               "--max-restarts", "1",
               "--grace-period", "600")  # fmt: skip
    script = (EXAMPLE, "--steps", "60", "--workers", "1")
    calm = run_job(cpulaunch, *options, *script, "--directory", "calm")
    struck = run_job(cpulaunch, *options, tmp_path / "struck.py", *script, "--directory", "struck")
    assert re.findall("weights .*", struck.stdout) == re.findall("weights .*", calm.stdout) != []
    assert len(re.findall(r"cpulaunch: resuming after step [24]0 from ", struck.stderr)) == 1


@pytest.mark.slow
def test_sharded_models_are_saved_and_loaded(cpulaunch: Run) -> None:
    done = run_job(cpulaunch, "-n", "2", PROGRAMS, "sharded", "ckpt")
    assert result(done.stdout) == {
        "step": 6, "same": True, "state": ["Tensor", "DTensor", "DTensor"], "equal": True,
    }  # fmt: skip


@pytest.mark.slow
def test_another_number_of_ranks_resumes_with_new_data(cpulaunch: Run) -> None:
    """20 steps of four ranks are 4 epochs, and the checkpoint is from the end of the 4th."""
    run_job(cpulaunch, "-n", "4", PROGRAMS, "job", "ckpt", "4")
    done = run_job(cpulaunch, "-n", "2", PROGRAMS, "job", "ckpt", "5")
    assert result(done.stdout) == {"first": [[4, 20]], "last": [[4, 29]]}
    assert (
        "cpulaunch: the checkpoint was saved by 4 ranks, and this job has 2: the order of the data and the "
        "random numbers will differ"
    ) in done.stderr


@needs_bf16
@pytest.mark.slow
def test_engines_load_each_others_checkpoints(tmp_path: Path) -> None:
    losses = []
    for engine, last in (("native", 20), ("ipex", 40)):
        command = [intel_python(), "-m", "cpulaunch", "run", "-n", "1", "--engine", engine, "--precision", "bf16",
                   PROGRAMS, "engines", "ckpt", last]  # fmt: skip
        done = subprocess.run([*map(str, command)], cwd=tmp_path, env=clean_environment(), text=True,
                              capture_output=True, timeout=LIMIT, stdin=subprocess.DEVNULL)  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = result(done.stdout)
        assert found["first"] == last - 20
        losses += found["losses"]
    # The four batches alternate.  No loss is higher than the batch's previous one, even after a change of
    # engine.
    assert all(later < earlier for earlier, later in zip(losses, losses[4:], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to"),
    [
        repeat(signal.SIGTERM, "a rank"),
        repeat(signal.SIGUSR1, "a rank"),
        (signal.SIGUSR1, "the launcher"),
    ],
)
def test_a_signal_saves_on_all_ranks_and_has_its_own_exit_code(
    tmp_path: Path, number: signal.Signals, to: str
) -> None:
    restarts = ("--max-restarts", "1", "--restart-on", "error")  # saving is not an error
    launcher = launch(tmp_path, "--tee", "all", *restarts, PROGRAMS, "job", "ckpt", 1000000)
    with bounded(launcher, LIMIT):
        assert launcher.stdout
        first = [launcher.stdout.readline(), launcher.stdout.readline()]
        pids = {line[:3]: int(line.split()[-1]) for line in first}
        while not complete(tmp_path / "ckpt"):
            assert launcher.poll() is None
        os.kill(pids["[1]"] if to == "a rank" else launcher.pid, number)
        _, errors = launcher.communicate()
    began = set(re.findall(rf"{number.name} on rank (\d+): saving step \d+, then ending", errors))
    assert began == {"1"} if to == "a rank" else {"0", "1"} >= began != set()
    (step,) = set(re.findall(rf"{number.name}: saved step (\d+), ending with exit code 75", errors))
    assert f"step-{step}" in complete(tmp_path / "ckpt")
    ended = outcome(tmp_path)
    assert {rank["status"] for rank in ended["ranks"]} <= {"exit 75", "ended by launcher"}
    assert (ended["kind"], ended["exit_code"], ended["restarts"]) == ("interrupted", 75, 0)
    assert "s; state saved; rerun the same command to resume\n" in errors
    assert "failed first" not in errors
    assert launcher.returncode == 75


@pytest.mark.slow
def test_an_unfinished_save_at_the_end_of_the_grace_period_is_reported(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "--grace-period", 2, PROGRAMS, "stuck", "ckpt")
    with bounded(launcher, LIMIT):
        assert launcher.stdout
        assert [launcher.stdout.readline().split()[-1] for _ in range(2)] == ["stuck", "stuck"]
        launcher.terminate()
        _, errors = launcher.communicate()
    late = "cpulaunch: SIGTERM: not saved within 1.6 s; the last checkpoint is that of step 5\n"
    assert errors.count(late) == 1, errors
    assert launcher.returncode == 128 + signal.SIGTERM


def test_forked_processes_and_the_script_handle_signals_themselves() -> None:
    """A thread handles a signal while the main thread waits, and a save in time is not reported as late.

    The same signal again within moments is ignored.  Later, it ends the program.
    """
    code = (
        "import multiprocessing, os, signal, threading, time, types\n"
        "from cpulaunch.runtime.checkpoint import signals\n"
        "from cpulaunch.runtime.checkpoint.signals import Signals\n"
        "signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n"
        "told = threading.Event()\n"
        "late = []\n"
        "def is_late(*what): late.append(what); told.set()\n"
        "first, second = Signals(is_late, 0), Signals(is_late, 3600)\n"
        "first.watch()\n"
        "fork = multiprocessing.get_context('fork')\n"
        "runs, never = fork.Event(), fork.Event()\n"
        "child = fork.Process(target=lambda: (runs.set(), never.wait(60)))\n"
        "child.start(); runs.wait(60); child.terminate(); child.join()\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "assert (child.exitcode, first.arrived, late) == (-15, 0, [])\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "assert told.wait(60) and first.arrived == signal.SIGUSR1 and late == [(signal.SIGUSR1, 0)]\n"
        "first.restore(); second.watch()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert second.arrived == signal.SIGTERM\n"
        "thread = next(each for each in threading.enumerate() if each.name == 'cpulaunch-late')\n"
        "second.mark_handled(); thread.join(0.5)\n"
        "assert len(late) == 1\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"  # the same signal, sent another way
        "signals.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() + signals.DUPLICATE)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True,
                          timeout=LIMIT, stdin=subprocess.DEVNULL)  # fmt: skip
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


@pytest.mark.slow
def test_errors_of_cpulaunch_name_the_users_line_and_a_remedy(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, cpulaunch\n"
        "open('file', 'w').close()\n"
        "cpulaunch.Checkpoint('file/below', model=torch.nn.Linear(1, 1))\n"
    )
    done = cpulaunch("run", "-n", "1", "train.py", timeout=LIMIT)
    _, lines = box(done.stderr)
    assert lines[0].startswith("cpulaunch.errors.UsageError: ")
    where = lines.index("at train.py:3")
    assert lines[where + 1] == "pass a directory that this user may write"
    assert outcome(tmp_path)["first_failure"]["file"] == "train.py"
