"""Scripts without cpulaunch's interface run with the planned backend and precision, unless that is switched
off."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Run
from support.marks import repeat

from runtime.conftest import Start

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("said", [repeat(()), ("gloo",), repeat(("mpi",)), repeat(("ccl",))])
def test_a_group_has_the_planned_backend(job: Start, said: tuple[str, ...]) -> None:
    done = job(2, "grouped", *said)
    assert [result["backend"] for result in done.results] == ["ccl", "ccl"]
    lines = [line for line in done.ours() if "changed in this script" in line]
    assert len(lines) == (said != ("ccl",))
    if lines:
        assert (f"backend ccl (not {said[0]}) (" if said else "backend ccl (") in lines[0]
    assert [result["answered"] for result in done.results] == [said[0] if said else "undefined"] * 2


def test_buffers_of_fsdp_are_in_shared_memory_and_change_no_numbers(job: Start) -> None:
    shared, ordinary = job(2, "sharded").results, job(2, "sharded", "ordinary").results
    assert all(result["blocks"] >= 2 for result in shared)
    assert [result["blocks"] for result in ordinary] == [0, 0]
    assert [result["losses"] for result in shared] == [result["losses"] for result in ordinary]


def test_a_scripts_own_data_parallel_model_is_in_the_planned_precision(job: Start) -> None:
    done = job(2, "plain", "none", options=("--precision", "bf16"))
    first, second = done.results
    assert first == second
    assert first["kinds"] == ["torch.bfloat16"]
    assert first["results"] == first["weights"] == ["torch.float32"]
    assert first["falls"]
    group, training = (line for line in done.ours() if "changed in this script" in line)
    assert group.partition(": ")[2].startswith("backend ccl (--as-written")
    assert training.endswith(
        ": DDP in bf16, where the script has no autocast; AdamW uses its fused implementation"
    )


@pytest.mark.parametrize(
    ("context", "options"),
    [("off", ()), repeat("none", ("--precision", "fp32")), repeat("none", ("--as-written",))],
)
def test_the_script_or_the_user_may_choose_another_precision(job: Start, context: str, options) -> None:
    for result in job(2, "plain", context, options=options).results:
        assert result["kinds"] == ["torch.float32"]


def test_a_script_that_trains_in_its_own_autocast_may_evaluate_outside(job: Start) -> None:
    done = job(1, "plain", "training")
    assert done.results[0]["kinds"] == ["torch.bfloat16", "torch.float32"]
    assert not [line for line in done.ours() if "autocast" in line]


@pytest.mark.parametrize(
    ("backend", "precision", "compressed"),
    [
        repeat("gloo", "none", False),
        ("gloo", "bf16", True),
        repeat("ccl", "bf16", False),
    ],  # ccl compresses only between hosts
)
def test_gradients_of_the_scripts_own_model_are_compressed_on_request(
    job: Start, backend: str, precision: str, compressed: bool
) -> None:
    options = ("--backend", backend, "--precision", "fp32", "--compress-gradients", precision)
    done = job(2, "plain", "none", options=options)
    assert [result["compressed"] for result in done.results] == [compressed] * 2
    assert any("gradients of DDP sent in bf16" in line for line in done.ours()) == compressed


LOADERS = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
def main():
    dist.init_process_group()
    for context in ("fork", "spawn", "forkserver"):
        total = torch.zeros(())
        for batch in DataLoader(torch.arange(8.0), 2, num_workers=2, multiprocessing_context=context):
            seen = batch.sum()
            dist.all_reduce(seen)
            total += seen
        assert total.item() == 28.0 * dist.get_world_size(), (context, total)
    print("loaded")
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "options",
    [
        repeat(("--backend", "gloo")),
        pytest.param(("--ccl-transport", "tcp"), marks=pytest.mark.repeats),
        ("--ccl-transport", "ofi"),
    ],
    ids="-".join,
)
def test_workers_of_data_loaders_start_by_each_method_beside_a_group(
    cpulaunch: Run, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "loaders.py").write_text(LOADERS)
    done = cpulaunch("run", "-n", "2", "--tee", "all", *options, "loaders.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loaded") == 2


@pytest.mark.parametrize(("options", "size"), [("{}", 1), repeat('{"cpu": true}', 2)])
def test_a_line_warns_of_separate_models_of_accelerators_as_written(
    job: Start, options: str, size: int
) -> None:
    done = job(2, "accelerated", options, options=("--as-written",))
    assert [result["size"] for result in done.results] == [size, size]
    warnings = [line for line in done.ours() if "they train 2 separate models" in line]
    assert len(warnings) == (size == 1)
    assert len(done.ours()) == len(warnings)


@pytest.mark.parametrize("options", ["{}", repeat('{"cpu": true}')])
def test_an_accelerator_trains_one_model_in_the_planned_precision(job: Start, options: str) -> None:
    done = job(2, "accelerated", options, options=("--precision", "bf16"))
    first, second = done.results
    assert first == second  # ranks began with different weights
    assert (first["backend"], first["state"], first["size"], first["batches"]) == ("ccl", "gloo", 2, 4)
    assert first["kinds"] == ["torch.bfloat16"]
    group, training = (line for line in done.ours() if "changed in this script" in line)
    assert "; accelerate on the CPU, in bf16 unless the script says otherwise (" in group
    assert training == "changed in this script: AdamW uses its fused implementation"


@pytest.mark.parametrize(
    ("said", "planned", "kinds"),
    [
        repeat('{"cpu": true}', "fp32", "float32"),
        repeat('{"cpu": true, "mixed_precision": "no"}', "bf16", "float32"),
    ],
)
def test_the_planned_precision_is_used_unless_the_script_names_one(job: Start, said, planned, kinds) -> None:
    for result in job(2, "accelerated", said, options=("--precision", planned)).results:
        assert result["kinds"] == [f"torch.{kinds}"]


@pytest.mark.parametrize(
    "options",
    [
        "{}",
        repeat('{"bf16": true, "ddp_backend": "gloo"}'),
        repeat('{"use_cpu": true, "ddp_backend": "ccl"}'),
    ],
)
def test_a_trainer_trains_evaluates_and_predicts(job: Start, options: str) -> None:
    done = job(2, "trainer", options, options=("--precision", "bf16"))
    for result in done.results:
        assert (result["backend"], result["size"], result["precision"]) == ("ccl", 2, "bf16")
        assert result["threads"]
        assert result["fused"]
        assert result["predictions"] == [32, 5]
        assert result["loss"] == done.results[0]["loss"]
    assert len([line for line in done.ours() if "accelerate on the CPU, in bf16" in line]) == 1


def test_a_trainer_with_fsdp_shards_its_parameters(job: Start) -> None:
    for result in job(2, "trainer", '{"fsdp": "full_shard"}', "llama").results:
        assert result["backend"] == "ccl"
        # These are the layers' parameters.  After a forward pass, the last ones are not sharded.
        assert result["sharded"] >= 18
        assert result["predictions"] == [32, 12, 50]
