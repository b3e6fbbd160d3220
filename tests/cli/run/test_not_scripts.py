"""Errors for other launchers' commands and shell scripts in the place of the script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpulaunch.cli.main import main


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("torchrun --nproc_per_node 2 train.py --lr 1", "--nproc_per_node 2 train.py --lr 1"),
        ("/usr/bin/torchrun -m pkg.train a", "-m pkg.train a"),
        ("accelerate launch --num_processes 2 train.py", "--num_processes 2 train.py"),
        ("mpirun -n 4 python train.py", "-n 4 train.py"),
        ("-v mpiexec -np 4 -genv A 1 python3 -u train.py x", "-v -np 4 -genv A 1 train.py x"),
        ("srun -n 2 python -m pkg", "-n 2 -m pkg"),
        ("python -u -W ignore train.py", "train.py"),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "--nproc-per-node 2 train.py"),
        ("cpulaunch run -n 2 train.py", "-n 2 train.py"),
        ("-m torch.distributed.run --nproc-per-node 2 train.py", "--nproc-per-node 2 train.py"),
        ("torchrun", "train.py"),
        ("cpu --ninstances 2 train.py --lr 1", "--ninstances 2 train.py --lr 1"),
        ("ipexrun cpu --ninstances 2 train.py", "--ninstances 2 train.py"),
        ("python -m torch.backends.xeon.run_cpu --ninstances 2 train.py", "--ninstances 2 train.py"),
        ("-m intel_extension_for_pytorch.cpu.launch --node_id 0 train.py", "--node_id 0 train.py"),
    ],
)
def test_the_hint_omits_a_launcher_in_the_place_of_the_script(
    script: None, capsys: pytest.CaptureFixture[str], command: str, instead: str
) -> None:
    assert main(["run", *command.split()]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    known = (
        "is not a script: cpulaunch ",
        "is another launcher: cpulaunch ",
        "an argument of ipexrun",
    )
    assert any(words in error for words in known)
    assert hint == f"cpulaunch: hint: type: cpulaunch run {instead}"


def test_a_script_can_be_called_cpu(script: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("cpu").write_text("print()\n")
    assert main(["run", "-n", "1", "--dry-run", "cpu", "train.py"]) == 0


def test_the_suggested_command_works(script: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mpirun", "-n", "1", "-genv", "A", "-1", "python", "train.py"]) == 2
    typed = capsys.readouterr().err.splitlines()[-1].partition("cpulaunch run ")[2].split()
    assert main(["run", "--dry-run", "--format", "json", *typed]) == 0
    assert json.loads(capsys.readouterr().out)["env"]["A"] == "-1"


def test_the_error_for_another_launcher_also_names_its_unsupported_option(
    script: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "torchrun", "--redirects", "3", "train.py"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert "torchrun is not a script" in error
    assert "--redirects: each rank's output" in error
    assert "--tee RANKS" in hint


@pytest.mark.parametrize(
    ("text", "shell"),
    [
        ("#!/bin/bash\n#SBATCH -N 4\nsrun python train.py\n", "bash"),
        ("#! /usr/bin/env zsh\nexit\n", "zsh"),
        (
            "#!/bin/sh\n'''exec' /venv/bin/python \"$0\" \"$@\"\n' '''\nprint()\n",
            "",
        ),  # the start of a script that pip installs
        ("#!/usr/bin/env python3\nprint()\n", ""),
        ("#!/venv/bash-completion/bin/python\nprint()\n", ""),
        ("print()  # !/bin/sh\n", ""),
        ("", ""),
    ],
)
def test_a_shell_script_is_refused(
    script: None, capsys: pytest.CaptureFixture[str], text: str, shell: str
) -> None:
    Path("job").write_text(text)
    assert main(["run", "--launcher", "local", "-n", "1", "--dry-run", "job"]) == (2 if shell else 0)
    said = f"job is a {shell} script, and ranks run Python"
    assert (said in capsys.readouterr().err) == bool(shell)
