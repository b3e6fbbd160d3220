"""Training with ``prepare`` on real ranks: its results, not its speed."""

from __future__ import annotations

import json
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

MLP = ("mlp", "20", "24")
WAYS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "accumulated": ("0", "3"),
    "in one bucket": ("0", "1", '{"static_graph": true, "bucket_mb": 1}'),
    "compressed": ("0", "1", '{"compress_gradients": "bf16", "bucket_mb": 7, "static_graph": true}'),
}
"""Ways to train: further arguments of `programs.train`."""


def test_ranks_train_as_one_process_with_the_whole_batch(job: Start, alone: Alone) -> None:
    """This includes accumulated batches and DDP's settings.  ccl compresses nothing within a host."""
    expected = alone("train", *MLP)["losses"]
    for result in job(2, "trainings", *MLP, json.dumps(WAYS), options=(*FP32, "--backend", "ccl")).results:
        assert {way: result[way]["losses"] for way in WAYS} == dict.fromkeys(
            WAYS, pytest.approx(expected, abs=1e-5)
        )
        assert result["compressed"] == result["plain"]
    assert expected[-1] < expected[0]


@pytest.mark.parametrize(("model", "backend"), [("mlp", "ccl"), repeat("bert", "gloo")])
def test_bf16_is_near_fp32_and_ranks_get_the_same_weights(
    job: Start, alone: Alone, model: str, backend: str
) -> None:
    exact = alone("train", model, "20", "24")
    options = ("--engine", "native", "--precision", "bf16", "--backend", backend)
    first, second = job(2, "train", model, "20", "24", "rank", options=options).results
    for result in (first, second):
        assert result["backend"] == backend
        assert result["losses"] == pytest.approx(exact["losses"], abs=BF16_LOSS)
        assert result["losses"] != exact["losses"]
    assert first["digest"] == second["digest"]


def test_gradients_are_compressed_by_settings_of_the_call_or_of_the_plan(job: Start) -> None:
    options = (*FP32, "--backend", "gloo")
    ways = json.dumps({way: WAYS[way] for way in ("plain", "compressed")})
    by_call, other = job(2, "trainings", *MLP, ways, options=options).results
    plain, compressed = by_call["plain"], by_call["compressed"]
    assert compressed["digest"] == other["compressed"]["digest"] != plain["digest"]
    assert compressed["losses"] == pytest.approx(plain["losses"], abs=BF16_LOSS)
    planned = (*options, "--compress-gradients", "bf16", "--bucket-mb", "7", "--static-graph")
    assert [each["digest"] for each in job(2, "train", *MLP, options=planned).results] == [
        compressed["digest"]
    ] * 2


def test_every_hook_averages_sparse_gradients(job: Start) -> None:
    hooks = ("average_in_place", "average_compressed", "average_in_bf16", "average_in_fp32")
    averaged = {"sparse": True, "bag": [0, 0.5, 0.5, 1, 0], "layer": [[2, 2]]}
    for backend, kinds in (("ccl", hooks), ("gloo", hooks[2:])):
        for result in job(2, "sparse", *kinds, options=(*FP32, "--backend", backend)).results:
            assert result == dict.fromkeys(kinds, averaged)


def test_compiled_models_train_like_eager_ones_and_keep_their_names(job: Start, alone: Alone) -> None:
    expected = alone("train", *MLP)["losses"][:10]
    first, second = job(2, "train", "mlp", "10", "24", options=(*FP32, "--compile")).results
    assert first["digest"] == second["digest"]
    assert first["losses"] == pytest.approx(expected, abs=1e-4)


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
    """The model is in channels_last; its fused AdamW would mix up states of another memory layout."""
    path = str(tmp_path / "checkpoint.pt")
    (saved,) = job(1, "checkpoint", "save", path, options=FP32).results
    assert saved["kinds"] == ["torch.float32"]
    (loaded,) = job(1, "checkpoint", "load", path, options=FP32).results
    assert loaded["losses"] == pytest.approx(saved["losses"], abs=1e-5)


REFUSED = {
    "unused": "2 parameters got no gradient in the last step on rank 0: spare.weight, spare.bias.",
    "plain backward": "step.backward(loss) was called 0 times for 1 batches",
    "backward twice": "step.backward(loss) was called twice for one batch",
    "early step": "the optimizer stepped after 1 of 2 batches",
    "not finished": "the optimizer stepped after 1 of 2 batches",
    "weighted sampler": "prepare can't shard a data loader with a WeightedRandomSampler: ",
    "no model": "prepare takes models, optimizers, learning rate schedulers and data loaders, not list",
}


def test_misuse_is_refused(job: Start) -> None:
    errors = job(2, "misuses", *REFUSED).results[0]
    assert [
        what for what, start in REFUSED.items() if not errors[what].startswith(f"UsageError: {start}")
    ] == []


REPORTED = {
    "nothing to train": "Sequential has no parameter that requires a gradient, so it isn't wrapped in DDP",
    "never steps": "AdamW was prepared, but its step() was never called",
    "no autocast": "Sequential runs outside of `with cpulaunch.autocast():`",
}


def test_a_model_that_would_not_train_is_reported_once(job: Start) -> None:
    done = job(2, "misuses", *REPORTED, options=("--engine", "native", "--precision", "bf16"))
    assert done.results == [dict.fromkeys(REPORTED, "")] * 2
    for expected in REPORTED.values():
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
    assert "never called" not in done.stderr
