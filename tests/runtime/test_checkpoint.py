"""Checkpoints: what goes on after one is what went on without one, bit for bit; and none is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import REPOSITORY, Run, bounded, clean_environment, intel_python
from support.jobs import outcome

PROGRAMS = Path(__file__).with_name("programs_checkpoint.py")
EXAMPLE = REPOSITORY / "examples" / "checkpoint.py"
LIMIT = 150.0


def alone(directory: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """A program on its own, without a launcher; ``before`` is done in a mount namespace for it alone."""
    command = [sys.executable, str(PROGRAMS), *arguments]
    if before:
        command = ["unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh", *command]
    return subprocess.run(command, cwd=directory, env=clean_environment(), capture_output=True, text=True,
                          timeout=LIMIT, stdin=subprocess.DEVNULL)  # fmt: skip


def result(output: str) -> Any:
    return json.loads(re.findall(r"RESULT (\{.*\})", output)[0])


def complete(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step-*") if path.suffix == "")


def test_training_goes_on_bit_for_bit_with_any_loader(tmp_path: Path) -> None:
    """Dropout, and random numbers of torch, NumPy and Python in the data; from within an epoch and its end."""
    done = alone(tmp_path, "continued")
    assert done.returncode == 0, done.stderr
    found = result(done.stdout)
    assert len(found) == 15
    wrong = {name: each for name, each in found.items() if each not in ([True, 13], [True, 10])}
    assert not wrong


def test_a_kill_within_a_save_loses_no_checkpoint(tmp_path: Path) -> None:
    """While files are written, before and after the directory gets its name, while an old one is removed."""
    calm = result(alone(tmp_path, "killed", "calm", "none").stdout)
    for point, left in {
        "writing-10": ["step-5"],
        "before-15": ["step-10", "step-5"],
        "after-20": ["step-10", "step-15", "step-20"],
        "removing-15": ["step-20", "step-25"],
    }.items():
        assert alone(tmp_path, "killed", "struck", point).returncode == -signal.SIGKILL
        assert complete(tmp_path / "struck") == left
    last = alone(tmp_path, "killed", "struck", "none")
    assert result(last.stdout) == {"weights": calm["weights"], "first": 25}
    assert "cpulaunch: goes on after step 25, from " in last.stderr
    assert sorted(path.name for path in (tmp_path / "struck").iterdir()) == ["step-30", "step-35"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_costs_a_line_for_each_save_and_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    done = alone(tmp_path, "full", "disk", before="mount -t tmpfs -o size=400k tmpfs disk")
    assert done.returncode == 0, done.stderr
    kept = ["step-5"]
    assert result(done.stdout) == {"5": kept, "10": kept, "15": kept, "20": ["step-20", "step-5"]}
    lines = [line for line in done.stderr.splitlines() if line]
    assert [line.partition(": ")[2] for line in lines] == [
        f"the checkpoint of step {step} was not saved: No space left on device; training goes on, and "
        f"{tmp_path}/disk/step-5 stays the last one"
        for step in (10, 15)
    ]


def test_what_does_not_fit_is_refused_in_a_line(tmp_path: Path) -> None:
    done = alone(tmp_path, "refused", "ckpt")
    assert done.returncode == 0, done.stderr
    said = {
        name: (re.sub(re.escape(str(tmp_path)) + "/", "", text), hint)
        for name, (text, hint) in result(done.stdout).items()
    }
    texts = {name: text for name, (text, _) in said.items()}
    other = "ckpt/step-1 is a checkpoint of another model: "
    assert texts == {
        "every": "Checkpoint: every is 'often': expected a number of steps such as 500, or a time such as 90s, "
        "10m or 2h",
        "keep": "Checkpoint: keep is 0; it takes at least 1",
        "scheduler": "Checkpoint: a scheduler has no state_dict and load_state_dict",
        "optimizer": "Checkpoint: optimizer takes Optimizers, not Sequential",
        "loader": "Checkpoint.steps: which data loader? steps(loader, epochs=3)",
        "directory": "file/below can't be written: Not a directory",
        "names": f"{other}it has no weight",
        "shapes": f"{other}0.weight has the shape 16×8 in it, and 9×8 in this script",
        "optimizers": f"{other}it holds 0 optimizers and 0 schedulers, and this script has 1 and 0",
        "facts": texts["facts"],
    }
    assert texts["facts"].startswith("ckpt/step-1/checkpoint.json can't be read: ")
    assert all(said[name][1] for name in ("directory", "names", "shapes", "optimizers", "facts"))


def run_job(cpulaunch: Run, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = cpulaunch("run", "--oversubscribe", "--tee", "all", *arguments, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ccl", "gloo"])
def test_a_job_whose_rank_is_killed_ends_with_the_weights_of_a_calm_one(
    cpulaunch: Run, tmp_path: Path, backend: str
) -> None:
    """On four ranks, whose sums depend on DDP's buckets; by prepare's EpochSampler; data by two workers."""
    (tmp_path / "struck.py").write_text(
        "import os, runpy, signal, sys, torch\n"
        "from torch.optim.optimizer import register_optimizer_step_post_hook\n"
        "first, steps = os.environ['CPULAUNCH_RESTART_COUNT'] == '0', []\n"
        "def stepped(*_):\n"
        "    steps.append(0)\n"
        "    if first and len(steps) == 47 and os.environ['RANK'] == '2': os.kill(os.getpid(), signal.SIGKILL)\n"
        "register_optimizer_step_post_hook(stepped)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    options = ("-n", "4", "--backend", backend, "--checkpoint-every", "20", "--max-restarts", "1")
    script = (EXAMPLE, "--steps", "60", "--workers", "1")
    calm = run_job(cpulaunch, *options, *script, "--directory", "calm")
    struck = run_job(cpulaunch, *options, tmp_path / "struck.py", *script, "--directory", "struck")
    assert re.findall("weights .*", struck.stdout) == re.findall("weights .*", calm.stdout) != []
    assert struck.stderr.count("cpulaunch: goes on after step 40, from ") == 1


@pytest.mark.slow
def test_sharded_models_are_saved_and_loaded(cpulaunch: Run) -> None:
    done = run_job(cpulaunch, "-n", "2", PROGRAMS, "sharded", "ckpt")
    assert result(done.stdout) == {
        "step": 6, "same": True, "state": ["Tensor", "DTensor", "DTensor"], "equal": True,
    }  # fmt: skip


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_new_data(cpulaunch: Run) -> None:
    """20 steps of four ranks have used up 4 epochs; the checkpoint is from the end of the 4th."""
    run_job(cpulaunch, "-n", "4", PROGRAMS, "job", "ckpt", "4")
    done = run_job(cpulaunch, "-n", "2", PROGRAMS, "job", "ckpt", "5")
    assert result(done.stdout) == {"first": [[4, 20]], "last": [[4, 29]]}
    assert (
        "cpulaunch: the checkpoint was saved by 4 ranks, this job has 2: the order of the data and "
        "random numbers are new from here on"
    ) in done.stderr


@pytest.mark.slow
def test_engines_load_each_others_checkpoints(tmp_path: Path) -> None:
    losses = []
    for engine, last in (("native", 20), ("ipex", 40), ("native", 60)):
        command = [intel_python(), "-m", "cpulaunch", "run", "-n", "1", "--engine", engine, "--precision", "bf16",
                   PROGRAMS, "engines", "ckpt", last]  # fmt: skip
        done = subprocess.run([*map(str, command)], cwd=tmp_path, env=clean_environment(), text=True,
                              capture_output=True, timeout=LIMIT, stdin=subprocess.DEVNULL)  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = result(done.stdout)
        assert found["first"] == last - 20
        losses += found["losses"]
    # The four batches take turns: none is harder than the last time, also where the engine has changed.
    assert all(later < earlier for earlier, later in zip(losses, losses[4:], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGTERM, "a rank"), (signal.SIGUSR1, "a rank"), (signal.SIGUSR1, "the launcher")],
)
def test_a_signal_saves_on_all_ranks_and_has_an_exit_code_of_its_own(
    tmp_path: Path, number: signal.Signals, to: str
) -> None:
    restarts = ("--max-restarts", "1", "--restart-on", "error")  # which it isn't
    command = [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--oversubscribe", "--tee", "all", *restarts,
               PROGRAMS, "job", "ckpt", "1000000"]  # fmt: skip
    launcher = subprocess.Popen([*map(str, command)], cwd=tmp_path, env=clean_environment(), text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    with bounded(launcher, LIMIT):
        assert launcher.stdout
        pids = [int(line.split()[-1]) for line in (launcher.stdout.readline(), launcher.stdout.readline())]
        while not complete(tmp_path / "ckpt"):
            assert launcher.poll() is None
        os.kill(pids[1] if to == "a rank" else launcher.pid, number)
        _, errors = launcher.communicate()
    (step,) = set(re.findall(rf"{number.name}: saved step (\d+), ending with exit code 75", errors))
    assert f"step-{step}" in complete(tmp_path / "ckpt")
    ended = outcome(tmp_path)
    assert {rank["status"] for rank in ended["ranks"]} <= {"exit 75", "ended by launcher"}
    assert (ended["kind"], ended["exit_code"], ended["restarts"]) == ("interrupted", 75, 0)
    assert "s; its state is saved, so the same command goes on from there\n" in errors
    assert "failed first" not in errors
    assert launcher.returncode == 75
