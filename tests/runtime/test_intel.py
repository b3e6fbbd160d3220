"""Intel's stack for real: torch 2.8 and IPEX 2.8, with the ccl group built for torch 2.8."""

from __future__ import annotations

import subprocess

import pytest
from support.command import clean_environment, intel_python, needs_bf16

from runtime.conftest import LIMIT, Start
from runtime.test_training import BF16_LOSS

pytestmark = pytest.mark.slow

IPEX, NATIVE = ("--engine", "ipex"), ("--engine", "native")


@needs_bf16
def test_adamw_on_split_weights_equals_adamw_of_torch(intel_job: Start) -> None:
    (result,) = intel_job(1, "adamw", "20").results
    assert result["worst"] < 2**-9  # half of bf16's last bit, relative to a tensor's largest weight
    assert result["worst"] > 0


@needs_bf16
def test_ipex_is_near_fp32_and_ranks_get_the_same_weights(intel_job: Start) -> None:
    """Three ranks sum bf16 gradients in fp32."""
    (exact,) = intel_job(1, "train", "mlp", "20", "24", options=("--precision", "fp32")).results
    done = intel_job(3, "train", "mlp", "20", "24", "rank", options=IPEX)
    assert [line for line in done.ours() if "engine ipex: as requested, version 2.8.0" in line]
    for result in done.results:
        assert result["backend"] == "ccl"
        assert result["losses"] == pytest.approx(exact["losses"], abs=BF16_LOSS)
    assert len({result["digest"] for result in done.results}) == 1


@needs_bf16
@pytest.mark.repeats  # examples/ipex_bert.py loads its checkpoint, too
@pytest.mark.parametrize(
    ("first", "second"), [(IPEX, NATIVE), (NATIVE, IPEX)], ids=["ipex to native", "native to ipex"]
)
def test_checkpoints_have_full_precision_and_load_with_either_engine(
    intel_job: Start, tmp_path, first: tuple[str, str], second: tuple[str, str]
) -> None:
    path = str(tmp_path / "checkpoint.pt")
    (saved,) = intel_job(1, "checkpoint", "save", path, options=first).results
    assert saved["kinds"] == ["torch.float32"]
    (loaded,) = intel_job(1, "checkpoint", "load", path, options=second).results
    assert loaded["losses"] == pytest.approx(saved["losses"], abs=0.05)


def test_ipex_cannot_be_imported_beside_a_transformers_without_a_module() -> None:
    """That is why cpulaunch looks for that module before it imports IPEX."""
    hidden = "import sys; sys.modules['transformers.modeling_attn_mask_utils'] = None; "
    done = subprocess.run(
        [intel_python(), "-c", hidden + "import intel_extension_for_pytorch"],
        env=clean_environment(), capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 1
    assert "NameError: name 'MoeModelOutputWithPast' is not defined" in done.stderr


@needs_bf16
def test_a_trainer_uses_ipex_with_one_line(intel_job: Start) -> None:
    for result in intel_job(2, "trainer", "{}", TEST_USE_IPEX="1").results:
        assert result["kinds"] == ["_IPEXLinear"]
        assert result["weights"] == ["torch.float32"]
        assert result["predictions"] == [32, 5]
        assert result["backend"] == "ccl"


@needs_bf16
@pytest.mark.repeats
def test_an_accelerator_uses_ipex_with_one_line(intel_job: Start) -> None:
    first, second = intel_job(
        2, "accelerated", '{"cpu": true, "mixed_precision": "bf16"}', TEST_USE_IPEX="1"
    ).results
    assert first == second  # ranks began with different weights
    assert (first["layers"], first["backend"], first["learnt"]) == (["_IPEXLinear"], "ccl", True)


def test_without_ipex_one_line_gives_the_reason_and_training_continues(job: Start) -> None:
    done = job(1, "trainer", "{}", TEST_USE_IPEX="1")
    assert done.results[0]["kinds"] == []
    assert [
        line
        for line in done.ours()
        if line.startswith("training continues without IPEX: IPEX is not installed")
    ]
