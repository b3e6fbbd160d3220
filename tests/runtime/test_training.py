"""Training with ``prepare`` on real ranks: its results, not its speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command import Run
from support.marks import repeat

from runtime.conftest import Start

pytestmark = pytest.mark.slow

Alone = Callable[..., Any]
FP32 = ("--precision", "fp32")
BF16_LOSS = 0.02
"""Maximum difference of a loss of about 1.6 from fp32's in the first 50 steps, as bf16 has 8 bits."""


@pytest.mark.parametrize("model", [repeat("mlp"), "bert"])
def test_n_ranks_train_as_one_process_with_n_times_the_batch(job: Start, alone: Alone, model: str) -> None:
    expected = alone("train", model, "50", "24")["losses"]
    ranks = 2 if model == "bert" else 3
    for result in job(ranks, "train", model, "50", "24", options=FP32).results:
        assert result["losses"] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0]


def test_accumulated_batches_are_one_batch(job: Start, alone: Alone) -> None:
    expected = alone("train", "mlp", "50", "24")["losses"]
    for result in job(2, "train", "mlp", "50", "24", "0", "3", options=FP32).results:
        assert result["losses"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_bf16_is_near_fp32_and_ranks_get_the_same_weights(job: Start, alone: Alone, backend: str) -> None:
    exact = alone("train", "bert", "50", "24")
    options = ("--engine", "native", "--precision", "bf16", "--backend", backend)
    first, second = job(2, "train", "bert", "50", "24", "rank", options=options).results
    for result in (first, second):
        assert result["backend"] == backend
        assert result["losses"] == pytest.approx(exact["losses"], abs=BF16_LOSS)
        assert result["losses"] != exact["losses"]
    assert first["digest"] == second["digest"]


@pytest.mark.parametrize(
    ("settings", "backend", "tolerance"),
    [
        ('{"compress_gradients": "bf16"}', "gloo", BF16_LOSS),
        ('{"static_graph": true, "bucket_mb": 1}', "ccl", 1e-5),
    ],
)
def test_ddp_by_settings(job: Start, alone: Alone, settings: str, backend: str, tolerance: float) -> None:
    expected = alone("train", "mlp", "50", "24")["losses"]
    options = (*FP32, "--backend", backend)
    first, second = job(2, "train", "mlp", "50", "24", "0", "1", settings, options=options).results
    assert first["digest"] == second["digest"]
    assert first["losses"] == pytest.approx(expected, abs=tolerance)
    if "compress" in settings:  # the gradients were compressed
        assert first["losses"] != pytest.approx(expected, abs=1e-7)


def test_ccl_compresses_nothing_within_a_host(job: Start) -> None:
    options = (*FP32, "--backend", "ccl")
    plain = job(2, "train", "mlp", "20", "24", options=options).results
    compressed = job(
        2, "train", "mlp", "20", "24", options=(*options, "--compress-gradients", "bf16")
    ).results
    assert compressed == plain


def test_settings_of_the_plan_reach_the_model(job: Start) -> None:
    """Compression, requested by an option of `run`, shows in the result."""
    options = (*FP32, "--backend", "gloo")
    planned = (*options, "--compress-gradients", "bf16", "--bucket-mb", "7", "--static-graph")
    by_plan, _ = job(2, "train", "mlp", "20", "24", options=planned).results
    settings = '{"compress_gradients": "bf16", "bucket_mb": 7, "static_graph": true}'
    by_call, _ = job(2, "train", "mlp", "20", "24", "0", "1", settings, options=options).results
    plain, _ = job(2, "train", "mlp", "20", "24", options=options).results
    assert by_plan["digest"] == by_call["digest"] != plain["digest"]


def test_compiled_models_train_alike_and_keep_their_names(job: Start, alone: Alone) -> None:
    expected = alone("train", "mlp", "50", "24")["losses"][:10]
    first, second = job(2, "train", "mlp", "10", "24", options=(*FP32, "--compile")).results
    assert first["digest"] == second["digest"]
    assert first["losses"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("options", [("--engine", "native"), repeat(FP32)])
@pytest.mark.repeats
def test_digits_are_learnt(job: Start, options: tuple[str, ...]) -> None:
    done = job(2, "digits", "12", options=options)
    assert all(result["accuracy"] >= 97 for result in done.results)
    assert [line for line in done.ours() if "engine native" in line]


@pytest.mark.parametrize("ranks", [repeat(1), 2])
def test_the_results_of_prepare(job: Start, ranks: int) -> None:
    results = job(ranks, "prepared").results
    for rank, result in enumerate(results):
        assert all(result[name] for name in ("idempotent", "originals", "keys", "channels_last", "fused"))
        assert result["size"] == ranks
        assert result["main"] == (rank == 0)
        assert result["wrapped"] == ("DataParallel" if ranks > 1 else "Sequential")
        for epoch in (0, 1):
            shares = [values[epoch] for values in result["epochs"]]
            assert set().union(*shares) == set(range(21))  # no example is left out …
            assert len({len(share) for share in shares}) == 1  # … all ranks make equally many steps …
            assert sum(map(len, shares)) - 21 < ranks  # … with the fewest possible repeated examples
        first, second = (result["epochs"][0][epoch] for epoch in (0, 1))
        assert first != second  # each epoch has its own order


def test_a_checkpoint_resumes_where_it_was_saved(job: Start, tmp_path) -> None:
    """A model in channels_last with a fused AdamW, which would mix up states of another layout."""
    path = str(tmp_path / "checkpoint.pt")
    (saved,) = job(1, "checkpoint", "save", path, options=FP32).results
    assert saved["kinds"] == ["torch.float32"]
    (loaded,) = job(1, "checkpoint", "load", path, options=FP32).results
    assert loaded["losses"] == pytest.approx(saved["losses"], abs=1e-5)


REFUSED = {
    "unused": "2 parameters got no gradient in the last step on rank 0: spare.weight, spare.bias.",
    "plain backward": "1 of a step's batches were taken, but step.backward(loss) was called 0 times",
    "backward twice": "step.backward(loss) was called twice for one batch",
    "early step": "the optimizer stepped after 1 of 2 batches",
    "not finished": "the optimizer stepped after 1 of 2 batches",
    "weighted sampler": "prepare can't shard a data loader with a WeightedRandomSampler of its own",
    "no model": "prepare takes models, optimizers, learning rate schedulers and data loaders, not list",
}


def test_misuse_is_refused(job: Start) -> None:
    errors = job(2, "refused", *REFUSED).results[0]
    assert [
        what for what, start in REFUSED.items() if not errors[what].startswith(f"UsageError: {start}")
    ] == []


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("nothing to train", "Sequential has nothing to train: it is left without data parallelism"),
        ("never steps", "AdamW was prepared, but never stepped: this script has not trained"),
        ("no autocast", "Sequential runs outside of `with cpulaunch.autocast():`"),
    ],
)
def test_a_model_that_would_not_train_is_reported_once(job: Start, what: str, expected: str) -> None:
    done = job(2, "misuse", what, options=("--engine", "native", "--precision", "bf16"))
    assert [result["error"] for result in done.results] == ["", ""]
    assert len([line for line in done.ours() if line.startswith(expected)]) == 1


FORKS = """
import os, sys, torch, cpulaunch
model = torch.nn.Linear(2, 2)
model, optimizer = cpulaunch.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
if os.fork() == 0:
    sys.exit()
os.wait()
with cpulaunch.autocast():
    model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


def test_a_forked_child_gets_no_warning_about_training_nothing(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    done = cpulaunch("run", "-n", "1", "forks.py")
    assert done.returncode == 0, done.stderr
    assert "never stepped" not in done.stderr
