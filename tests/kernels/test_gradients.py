"""Gradients of embeddings, and the loss of causal models within autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cpulaunch.runtime.change import transformers as changes
from kernels.conftest import Calls

ROWS, WIDTH = 70_000, 64  # more than the least size of csrc/embedding.cpp


class Tied(nn.Module):
    """An embedding, and a last layer that shares its weights."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.last.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.embedding(tokens)))[:, ::1000].square().mean()  # type: ignore[no-any-return]


def model_and_tokens(tied: bool = True) -> tuple[Tied, torch.Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(ROWS, (50,))
    tokens[:5] = tokens[5]
    return Tied(tied), tokens


def gradient(model: Tied, tokens: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(tokens).backward()
    assert model.embedding.weight.grad is not None
    return model.embedding.weight.grad


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_embeddings_are_dense_and_match_fp64(ops: Any, tied: bool) -> None:
    model, tokens = model_and_tokens(tied)
    wide = copy.deepcopy(model).double()
    for _ in range(2):  # the second time, the hook exists
        found, right = gradient(model, tokens), gradient(wide, tokens)
        assert found.layout == torch.strided
        assert (found.double() - right).norm() < 1e-5 * right.norm()
    assert "gradients of embeddings" in ops.replaced()
    ops.use(False)
    torch.testing.assert_close(found, gradient(model, tokens), rtol=1e-5, atol=1e-9)


def test_gradients_accumulate_and_embeddings_may_be_used_twice(ops: Any) -> None:
    model, tokens = model_and_tokens()
    once = gradient(model, tokens).clone()
    model(tokens).backward()
    torch.testing.assert_close(model.embedding.weight.grad, 2 * once)
    untied = nn.Embedding(ROWS, WIDTH)
    (untied(tokens) + untied(tokens.flip(0))).sum().backward()
    assert untied.weight.grad is not None
    assert untied.weight.grad.layout == torch.strided
    assert untied.weight.grad.sum() == 2 * 50 * WIDTH


def test_autograd_grad_and_checkpoints_get_dense_gradients(ops: Any) -> None:
    model, tokens = model_and_tokens(tied=False)
    right = gradient(model, tokens).clone()
    (found,) = torch.autograd.grad(model(tokens), model.embedding.weight)
    assert torch.equal(found, right)
    model.zero_grad()
    checkpoint(model, tokens, use_reentrant=False).backward()
    assert torch.equal(model.embedding.weight.grad, right)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_the_program_see_dense_gradients(ops: Any, first: bool) -> None:
    model, tokens = model_and_tokens(tied=False)
    if not first:
        gradient(model, tokens)
    seen = []
    model.embedding.weight.register_hook(lambda grad: seen.append(grad.layout))  # type: ignore[no-untyped-call]
    model.embedding.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.layout))  # type: ignore[union-attr]
    gradient(model, tokens)
    gradient(model, tokens)
    assert seen == 4 * [torch.strided]


def test_other_gradients_of_embeddings_are_torchs(ops: Any) -> None:
    model, tokens = model_and_tokens(tied=False)
    weight = model.embedding.weight
    out = functional.embedding(tokens, weight)
    (first,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    assert second.layout == torch.strided
    assert torch.equal(torch.func.grad(lambda w: functional.embedding(tokens, w).sum())(weight).nonzero()[:, 0].unique(),
                       tokens.unique())  # fmt: skip
    (padded,) = torch.autograd.grad(
        functional.embedding(tokens, weight, padding_idx=int(tokens[0])).sum(), weight
    )
    assert padded[tokens[0]].abs().sum() == 0
    (sparse,) = torch.autograd.grad(functional.embedding(tokens, weight, sparse=True).sum(), weight)
    assert sparse.layout == torch.sparse_coo
    scaled = weight * 2  # no leaf
    (of_scaled,) = torch.autograd.grad(functional.embedding(tokens, scaled).sum(), weight)
    assert of_scaled.sum() == 2 * 50 * WIDTH


# --- losses within autocast


def test_autocast_reads_bf16_logits_and_computes_in_fp32(ops: Any) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(37, 1003) * 5).bfloat16().requires_grad_()
    target = torch.randint(1003, (37,))
    target[::5] = -100
    wide = logits.detach().double().requires_grad_()
    right = functional.cross_entropy(wide, target)
    with torch.autocast("cpu", torch.bfloat16), Calls() as calls:
        loss = functional.cross_entropy(logits, target)
        loss.backward()
    right.backward()
    assert calls.ours == ["cpulaunch.cross_entropy.default", "cpulaunch.cross_entropy_backward.default"]
    assert not any("_to_copy" in name for name in calls.names)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=1e-6)
    assert logits.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=2**-8, atol=1e-7)


def test_other_losses_within_autocast_are_torchs(ops: Any) -> None:
    torch.manual_seed(1)
    logits, target = (torch.randn(37, 1003) * 5).bfloat16(), torch.randint(1003, (37,))

    def losses() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [
                functional.cross_entropy(logits.double(), target),
                functional.cross_entropy(logits, target, label_smoothing=0.1),
                functional.cross_entropy(logits, target, weight=torch.ones(1003)),
                functional.cross_entropy(logits, logits.softmax(1)),
                torch.func.grad(lambda x: functional.cross_entropy(x, target))(logits),
                torch.vmap(functional.cross_entropy)(logits[None], target[None]),
            ]

    ours = losses()
    ops.use(False)
    for one, other in zip(ours, losses(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_second_derivatives_of_a_loss_within_autocast(ops: Any) -> None:
    def penalty(logits: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(logits, target)
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        (second,) = torch.autograd.grad(first.float().square().sum(), logits)
        return second

    torch.manual_seed(1)
    logits, target = torch.randn(5, 300).bfloat16().requires_grad_(), torch.randint(300, (5,))
    wide = logits.detach().float().requires_grad_()
    found, right = penalty(logits).float(), penalty(wide)
    assert (found - right).norm() < 0.02 * right.norm()


def test_the_loss_of_causal_models_leaves_logits_in_bf16(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = pytest.importorskip("transformers.loss.loss_utils")
    original = getattr(losses.ForCausalLMLoss, "__wrapped__", losses.ForCausalLMLoss)
    monkeypatch.setattr(losses, "ForCausalLMLoss", original)
    monkeypatch.setattr(losses, "LOSS_MAPPING", {"ForCausalLM": original})
    changes._keep_logits_in_bf16(losses, None)  # type: ignore[arg-type]
    ours = losses.LOSS_MAPPING["ForCausalLM"]
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 9, 500).bfloat16(), torch.randint(500, (2, 9))
    for options in (
        {},
        {"num_items_in_batch": 7},
        {"shift_labels": labels},
        {"ignore_index": int(labels[0, 3])},
    ):
        values = []
        for loss in (original, ours):
            x = logits.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16), Calls() as calls:
                value = loss(x, labels, 500, **options)
                value.backward()
            values.append((value, x.grad))
        assert not any("_to_copy" in name for name in calls.names)
        torch.testing.assert_close(values[0], values[1], rtol=2**-7, atol=1e-7)
        assert values[1][0].dtype == torch.float32
    assert ours(logits, labels, 500).dtype == torch.float32  # not within autocast
