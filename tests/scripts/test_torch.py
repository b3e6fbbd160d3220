"""Scripts with torch alone: meshes, pipelines, checkpoints, sparse gradients, and names of groups' backends."""

from __future__ import annotations

import pytest
from support.marks import repeat

from scripts.conftest import Start, assert_alike, by_mpirun

pytestmark = pytest.mark.slow

PROGRAMS = "programs_torch.py"
VARIABLES = "programs_variables.py"
FP32 = ("--precision", "fp32")
NOT_OURS = {"TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_SIGNALS_TO_HANDLE"}


def test_meshes_use_the_planned_backend_and_train_as_under_torchrun(start: Start, by_torchrun: Start) -> None:
    theirs, ours = by_torchrun(PROGRAMS, "sharded").results, start(PROGRAMS, "sharded", options=FP32)
    for one, other in zip(ours.results, theirs, strict=True):
        assert (one.pop("backend"), other["backend"]) == ("cpu:ccl", "cpu:gloo")
        assert other["loaded"]
        assert_alike(one, {key: value for key, value in other.items() if key != "backend"})
    (line,) = [line for line in ours.ours() if "changed in this script" in line]
    assert line.endswith("backend ccl (--as-written leaves the script alone)")  # DTensors have no fused step


@pytest.mark.repeats
def test_sparse_gradients_train_as_under_torchrun(start: Start, by_torchrun: Start) -> None:
    ours = start(PROGRAMS, "sparse", options=FP32)
    assert_alike(ours.results, by_torchrun(PROGRAMS, "sparse").results)
    assert any(
        "SGD uses its fused implementation" in line for line in ours.ours()
    )  # while gradients were dense


@pytest.mark.repeats
@by_mpirun
def test_older_ways_to_share_a_model_train_as_under_torchrun(start: Start, by_torchrun: Start) -> None:
    ours = start(PROGRAMS, "older", options=FP32).results
    assert_alike(ours, by_torchrun(PROGRAMS, "older").results)


def test_groups_report_the_backend_name_that_the_script_knows(start: Start) -> None:
    names = ("none", "gloo", "nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo")
    ours = start(PROGRAMS, "named", *names)
    for result in ours.results:
        for name in names:
            answered, real, total = result[name]
            assert answered == [{"none": "undefined", "nccl": "gloo"}.get(name, name)] * 3
            assert (real, total) == ("ccl", 8.0)
    assert any("backend ccl (not nccl)" in line for line in ours.ours())


@by_mpirun
def test_ranks_have_torchruns_variables(start: Start, by_torchrun: Start) -> None:
    theirs, ours = by_torchrun(VARIABLES).results, start(VARIABLES).results
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert other.keys() - one.keys() <= NOT_OURS
        alike = (
            "RANK",
            "WORLD_SIZE",
            "ROLE_RANK",
            "ROLE_WORLD_SIZE",
            "ROLE_NAME",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
        )
        for name in (*alike, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"):
            assert one[name] == other[name], (rank, name)
        assert one["TORCHELASTIC_RUN_ID"] == one["CPULAUNCH_JOB_ID"]


@pytest.mark.parametrize("options", [repeat(("--precision", "bf16")), ("--as-written",)])
def test_ranks_without_a_group_get_a_warning_about_separate_models(
    start: Start, options: tuple[str, ...]
) -> None:
    lines = start(PROGRAMS, "alone", options=options).ours()
    (line,) = [line for line in lines if "they train 2 separate models" in line]
    assert "Trainer(strategy='ddp', devices=2)" in line
    # The planned precision doesn't reach a script without DDP either.
    assert sum("this script's precision is its own" in line for line in lines) == (
        "--as-written" not in options
    )
