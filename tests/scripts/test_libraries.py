"""Scripts with libraries that don't know cpulaunch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.marks import repeat

from scripts.conftest import Start, assert_alike, by_mpirun

pytestmark = pytest.mark.slow

PROGRAMS = "programs_libraries.py"
FP32 = ("--precision", "fp32")
SLURM = {  # an allocation whose batch script calls cpulaunch
    "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip


def deepspeed() -> dict[str, str]:
    directory = os.environ.get("CPULAUNCH_TEST_DEEPSPEED")
    if not directory:
        pytest.skip("CPULAUNCH_TEST_DEEPSPEED is not set: scripts/test.sh sets it")
    return {"PYTHONPATH": directory}


@by_mpirun
def test_lightning_in_slurm_trains_in_the_planned_precision(start: Start, by_torchrun: Start) -> None:
    ours = start(PROGRAMS, "lightning", options=("--precision", "bf16"), **SLURM)
    for result, other in zip(ours.results, by_torchrun(PROGRAMS, "lightning").results, strict=True):
        assert result["environment"] == "TorchElasticEnvironment"
        assert_alike(result["32-true"], other["32-true"])
        assert_alike(result["bf16-mixed"], other["bf16-mixed"])
        assert result["None"][:2] == [2, "torch.bfloat16"]
        for devices in ("auto", 4):
            assert "does not match the world size (2)" in result[f"{devices} devices"]
    lines = ours.ours()
    assert any("Lightning's precision bf16-mixed, because the script names none" in line for line in lines)
    assert any("they train 2 separate models" in line for line in lines)  # Trainer's own default


@pytest.mark.repeats
def test_fabric_trains_as_under_torchrun(start: Start, by_torchrun: Start) -> None:
    theirs = by_torchrun(PROGRAMS, "fabric").results
    ours = start(PROGRAMS, "fabric", options=("--precision", "bf16")).results
    for one, other in zip(ours, theirs, strict=True):
        assert_alike(one["32-true"], other["32-true"])
        assert one["None"][1] == ["torch.bfloat16"]


@by_mpirun
def test_ignite_wraps_its_models_and_trains_as_under_torchrun(start: Start, by_torchrun: Start) -> None:
    ours = start(PROGRAMS, "ignite", options=FP32).results
    assert ours[0]["weights"] == ours[1]["weights"]
    assert ours[0]["wrapped"] == "DistributedDataParallel"
    assert_alike(ours, by_torchrun(PROGRAMS, "ignite").results)


@pytest.mark.parametrize("name", ["test_script", repeat("test_sync"), repeat("test_ops")])
def test_accelerates_own_scripts_pass(start: Start, name: str) -> None:
    """``test_distributed_data_loop`` is left out: accelerate joins uneven inputs only on GPUs."""
    import accelerate.test_utils

    start(Path(accelerate.test_utils.__file__).with_name("scripts") / f"{name}.py", options=FP32)


@by_mpirun
@pytest.mark.parametrize(
    ("version", "kind"), [("1", "FullyShardedDataParallel"), repeat("2", "FSDPSequential")]
)
def test_accelerate_shards_a_model_by_both_versions_of_fsdp(start: Start, version: str, kind: str) -> None:
    done = start(PROGRAMS, "accelerate", version, options=FP32)
    warnings = [line for line in done.ours() if "can't save a model of FSDP version 1" in line]
    assert len(warnings) == (version == "1")
    for result in done.results:
        assert (result["kind"], result["class"], result["size"]) == ("DistributedType.FSDP", kind, 2)
        assert result["losses"] == pytest.approx(LOSSES, abs=2e-3)


@pytest.mark.repeats
@by_mpirun
def test_a_trainer_evaluates_saves_and_resumes(start: Start, by_torchrun: Start) -> None:
    ours = start(PROGRAMS, "trainer", options=FP32).results
    assert ours[0]["steps"] == [2, 4]
    assert_alike(ours, by_torchrun(PROGRAMS, "trainer").results)


@by_mpirun
def test_accelerate_trains_with_deepspeed(start: Start) -> None:
    bf16 = ("--precision", "bf16")
    for result in start(PROGRAMS, "accelerate", "deepspeed", options=bf16, **deepspeed()).results:
        assert (result["kind"], result["class"]) == ("DistributedType.DEEPSPEED", "DeepSpeedEngine")
        assert (result["size"], result["precision"]) == (2, "torch.bfloat16")
        assert result["losses"] == pytest.approx(LOSSES, abs=2e-2)


@pytest.mark.repeats
def test_deepspeeds_own_engine_and_a_trainer_with_deepspeed_train(start: Start, by_torchrun: Start) -> None:
    env = deepspeed()
    assert_alike(
        start(PROGRAMS, "deepspeed", **env).results, by_torchrun(PROGRAMS, "deepspeed", **env).results
    )
    for result in start(PROGRAMS, "trainer", "deepspeed", **env).results:
        assert (result["engine"], result["steps"]) == ("DeepSpeedEngine", [2, 4])


LOSSES = [1.509, 1.481, 1.335, 1.372, 1.382, 1.231]
"""The DeepSpeed plug-in of `accelerate`."""
