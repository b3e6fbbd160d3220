"""The commands of docs/slurm.md that start a job."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.command import REPOSITORY, clean_environment, needs_two_cores
from support.marks import repeat
from support.namespaces import until
from support.slurm import Queue

from slurm.conftest import CPULAUNCH, HOSTS

pytestmark = [pytest.mark.slow, needs_two_cores]

PAGE = (REPOSITORY / "docs" / "slurm.md").read_text()
EIGHT = sorted(f"{rank} of 8 on {host}" for rank, host in enumerate(host for host in HOSTS for _ in "12"))


@pytest.fixture
def environ(queue: Queue, tmp_path: Path) -> dict[str, str]:
    """A directory in which cpulaunch is a program and shows all ranks' lines, and train.py prints its rank
    and host."""
    (tmp_path / "train.py").write_text(
        "import os, socket\n"
        "print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], 'on', socket.gethostname())\n"
    )
    (tmp_path / "bin").mkdir()
    (program := tmp_path / "bin" / "cpulaunch").write_text(f'#!/bin/sh\nexec {shlex.join(CPULAUNCH)} "$@"\n')
    program.chmod(0o755)
    clean = clean_environment(LC_ALL="C.UTF-8", CPULAUNCH_OUTPUT_TEE="all", **queue.environment)
    return clean | {"PATH": f"{program.parent}:{clean['PATH']}"}


def shown(text: str) -> list[str]:
    """Return what the ranks have printed, without their prefixes."""
    return sorted(line.partition("] ")[2] for line in text.splitlines() if line.startswith("["))


def test_salloc(queue: Queue, environ: dict[str, str], tmp_path: Path) -> None:
    salloc, run = re.findall(r"^\$ (salloc .*|cpulaunch run .*)$", PAGE, re.M)[:2]
    argv = [*shlex.split(salloc), *shlex.split(run)]
    done = queue.run("login", argv, directory=tmp_path, env=environ)
    assert shown(done.stdout) == EIGHT, done.stderr


SCRIPTS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.parametrize(
    "script", SCRIPTS[:1] + [repeat(script) for script in SCRIPTS[1:]], ids=range(len(SCRIPTS))
)
def test_sbatch(script: str, queue: Queue, environ: dict[str, str], tmp_path: Path) -> None:
    """The commands are the first batch script, and the script converted from torchrun."""
    (tmp_path / "job.sh").write_text(script)
    done = queue.run("login", ["sbatch", "--wait", "job.sh"], directory=tmp_path, env=environ)
    (output,) = (path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert done.returncode == 0, output
    assert shown(output) == EIGHT, output


SUBMITS = re.findall(r"^\$ (cpulaunch submit .* -ppn 2 .*)$", PAGE, re.M)


@pytest.mark.parametrize("submit", [repeat(each) if "--follow" in each else each for each in SUBMITS])
def test_submit(submit: str, queue: Queue, environ: dict[str, str], tmp_path: Path) -> None:
    """The page's other commands need a training that saves; test_submit.py tests them."""
    done = queue.run("login", shlex.split(submit), directory=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    until(lambda: not queue.jobs(), "the job to end", 60.0)
    (output,) = (path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert shown(output) == EIGHT, output
    assert shown(done.stdout) == (EIGHT if "--follow" in submit else [])


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--rdzv-endpoint node0:29500", "no rendezvous service is needed"),
        repeat("--node-rank 1", "numbers them in the hostfile's order"),
        repeat("--machine_rank 1", "numbers them in the hostfile's order"),
    ],
)
def test_leftovers_of_another_launchers_script_cause_errors_with_remedies(
    option: str, why: str, queue: Queue, environ: dict[str, str], tmp_path: Path
) -> None:
    argv = ["salloc", "--quiet", "--nodes=2", "--exclusive", "cpulaunch", "run", *option.split(), "train.py"]
    done = queue.run("login", argv, directory=tmp_path, env=environ)
    assert done.returncode == 2
    assert why in done.stderr


def test_accelerates_number_of_processes_is_used_for_the_job(
    queue: Queue, environ: dict[str, str], tmp_path: Path
) -> None:
    words = ["cpulaunch", "run", "--num_processes", "8", "train.py"]
    argv = ["salloc", "--quiet", "--nodes=4", "--exclusive", *words]
    done = queue.run("login", argv, directory=tmp_path, env=environ)
    assert shown(done.stdout) == EIGHT, done.stderr
