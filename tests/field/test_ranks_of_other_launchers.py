"""Scripts that call cpulaunch in processes of another launcher train one model, or get an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.command import TIMEOUT, Run, clean_environment, mpi_options
from support.marks import repeat

from cpulaunch.errors import UsageError
from cpulaunch.launchers.other import started_as
from cpulaunch.runtime.join import environment_to_join, other_launchers_rank

SCRIPT = """
import json, os, sys, torch, torch.distributed as dist, cpulaunch
early = [cpulaunch.rank(), cpulaunch.world_size(), cpulaunch.shard([0, 1])]
model = torch.nn.Linear(2, 2)
if sys.argv[1] == "init":
    cpulaunch.init()
elif sys.argv[1] == "prepare":
    cpulaunch.prepare(model)
else:
    cpulaunch.Checkpoint("checkpoints", model=model)
total = torch.ones(1)
dist.all_reduce(total)
result = json.dumps([*early, dist.get_rank(), dist.get_world_size(), total.item()])
os.write(1, f"RESULT {result}\\n".encode())  # whole, beside other ranks' lines
dist.destroy_process_group()
"""

ONE_TRAINING = [[0, 2, [0], 0, 2, 2.0], [1, 2, [1], 1, 2, 2.0]]
TWO_TRAININGS = [[0, 1, [0, 1], 0, 1, 1.0]] * 2


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def results(stdout: str) -> list[Any]:
    """The results that the processes printed, in the order of ranks, without the launcher's line prefixes."""
    lines = [line.partition("RESULT ")[2] for line in stdout.splitlines() if "RESULT " in line]
    return sorted(map(json.loads, lines))


def mpiexec(flavour: str) -> list[str]:
    if flavour == "intel":
        return [str(Path(sys.prefix, "bin", "mpiexec.hydra"))]
    options = ["--allow-run-as-root", "--oversubscribe"] if flavour == "openmpi" else []
    return [str(Path(mpi_options(flavour)[-1], "mpiexec")), *options]


def start(argv: Sequence[object], directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, argv)], cwd=directory, env=clean_environment(**env), capture_output=True, text=True,
        timeout=TIMEOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flavour", "call"), [("intel", "init"), ("mpich", "prepare"), ("openmpi", "Checkpoint")]
)
def test_ranks_of_an_mpiexec_train_one_model(flavour: str, call: str, script: Path, tmp_path: Path) -> None:
    done = start([*mpiexec(flavour), "-n", "2", sys.executable, script, call], tmp_path)
    assert results(done.stdout) == ONE_TRAINING, done.stderr
    assert done.stderr.count("started 2 ranks: they train one model") == 1


@pytest.mark.repeats
@pytest.mark.slow
def test_ranks_started_by_a_shell_train_one_model(script: Path, tmp_path: Path) -> None:
    line = f"{sys.executable} {script} init; exit $?"
    done = start([*mpiexec("intel"), "-n", "2", "sh", "-c", line], tmp_path)
    assert results(done.stdout) == ONE_TRAINING, done.stderr


@pytest.mark.repeats
@pytest.mark.slow
def test_processes_of_a_sweep_stay_separate(script: Path, tmp_path: Path) -> None:
    argv = [*mpiexec("intel"), "-n", "2", sys.executable, script, "init"]
    assert results(start(argv, tmp_path, CPULAUNCH_SEPARATE="1").stdout) == TWO_TRAININGS


@pytest.mark.slow
@pytest.mark.parametrize("options", [repeat("-N1 -n2"), "-N2 -n2"])
def test_tasks_of_a_step_train_one_model(
    options: str, salloc: Callable[..., Any], script: Path, tmp_path: Path
) -> None:
    step = ["srun", "--overlap", *options.split(), sys.executable, str(script), "init"]
    done = salloc("-N2 -n2 --overcommit", program=step)
    assert results(done.stdout) == ONE_TRAINING, done.stderr


@pytest.mark.repeats
@pytest.mark.slow
def test_a_program_in_an_allocation_or_a_step_of_one_task_is_one_process(
    salloc: Callable[..., Any], script: Path
) -> None:
    for step in ([], ["srun", "-n1"]):
        done = salloc("-N1 -n2", program=[*step, sys.executable, str(script), "init"])
        assert results(done.stdout) == TWO_TRAININGS[:1], done.stderr


def test_ranks_on_several_hosts_without_rank_0s_address_are_an_error(script: Path, tmp_path: Path) -> None:
    on_two_hosts = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    done = start([sys.executable, script, "init"], tmp_path, **on_two_hosts)
    assert done.returncode == 1
    assert (
        "mpiexec of Intel MPI or MPICH started this process as rank 0 of 4, on several hosts, and doesn't give "
        "the address of rank 0" in done.stderr
    )
    assert "`cpulaunch run` starts the ranks itself" in done.stderr


STEP = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[2-3]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
}  # fmt: skip


def test_ranks_of_a_step_meet_on_its_first_node() -> None:
    started = started_as(STEP)
    assert started is not None
    joining = environment_to_join(started, STEP)
    assert (joining["MASTER_ADDR"], joining["RANK"], joining["WORLD_SIZE"]) == ("node2", "1", "4")
    assert "LOCAL_WORLD_SIZE" not in joining
    assert (
        environment_to_join(started, STEP | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] != joining["MASTER_PORT"]
    )


@pytest.mark.parametrize(
    ("given", "rank"),
    [
        # A batch script, a step with one task, and an mpiexec with one process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "0"}, None),
        (STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        # An mpiexec that starts one process per host by srun.
        (STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 8)),
        # Slurm's own PMI.
        (STEP | {"PMI_RANK": "1", "PMI_SIZE": "4"}, (1, 4)),
        ({"PALS_RANKID": "3", "PMI_SIZE": "4", "PMI_RANK": "3"}, (3, 4)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"FLUX_TASK_RANK": "1", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f2Xz", "FLUX_JOB_SIZE": "2"}, (1, 2)),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"}, (1, 2)),
        (STEP | {"WORLD_SIZE": "4"}, None),  # started by torchrun
        (STEP | {"CPULAUNCH_JOB_ID": "j"}, None),  # an instance
        (STEP | {"CPULAUNCH_SEPARATE": "1"}, None),
    ],
)  # fmt: skip
def test_variables_of_a_step_but_not_of_an_allocation_make_a_rank(
    given: Mapping[str, str], rank: tuple[int, int] | None
) -> None:
    started = other_launchers_rank(given)
    assert (started and (started.rank, started.size)) == rank


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"PMIX_RANK": "1"}, "no variable has the number of ranks"),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "contradict each other"),
        ({"CPULAUNCH_SEPARATE": "maybe"}, "valid: 0, 1"),
    ],
)
def test_incomplete_or_contradictory_variables_are_an_error(given: Mapping[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        other_launchers_rank(given)


def test_an_address_set_by_the_user_is_used() -> None:
    given = {"PMI_RANK": "0", "PMI_SIZE": "4", "MASTER_ADDR": "node7"}
    started = started_as(given)
    assert started is not None
    assert environment_to_join(started, given)["MASTER_ADDR"] == "node7"


ALONE = """
import os, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()  # line 6
print("stepped")
"""


@pytest.mark.parametrize("options", [(), repeat(("--as-written",))], ids=["changed", "as written"])
def test_ranks_without_a_process_group_are_an_error_with_strict(
    options: Sequence[str], cpulaunch: Run, tmp_path: Path
) -> None:
    """Without ``--strict``, there is a warning: see tests/scripts/test_torch.py."""
    (tmp_path / "alone.py").write_text(ALONE)
    job = ("run", "-n", "2", "--oversubscribe", "--backend", "gloo", "--precision", "fp32", *options)
    done = cpulaunch(*job, "--strict", "--log-dir", "strict", "alone.py")
    assert (done.returncode, "stepped" in done.stdout) == (1, False), done.stderr
    (path,) = tmp_path.glob("strict/*/outcome.json")
    first = json.loads(path.read_text())["first_failure"]
    assert f"UsageError: {tmp_path}/alone.py:6: at the first optimizer step" in first["error"]
    assert (first["file"], first["line"]) == ("alone.py", 6)
