"""Attention with dropout: values and derivatives against fp64, masks, memory, and cases left to torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernels.conftest import Calls

P = 0.2


def make(
    batch: int, heads: int, queries: int, keys: int, depth: int, kind: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return query, key and value as models make them: (batch, rows, heads, depth), transposed."""
    torch.manual_seed(queries + keys)
    shapes = [(batch, rows, heads, depth) for rows in (queries, keys, keys)]
    return [torch.randn(shape).to(kind).transpose(1, 2).requires_grad_() for shape in shapes]


def reference(
    ops: Any, inputs: list[torch.Tensor], seed: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> list[torch.Tensor]:
    """Output and gradients in fp64.  The gradient of the output is the sine of the index."""
    query, key, value = (each.detach().double().requires_grad_() for each in inputs)
    scores = query @ key.transpose(2, 3) / math.sqrt(query.size(3))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    probabilities = torch.nan_to_num(scores.softmax(3), nan=0.0)
    keys = key.size(2)
    ones = torch.ones(*scores.shape[:3], -(-keys // 32) * 32)
    kept = (ops.dropout(ones, seed, P)[..., :keys] != 0) / (1 - P)
    output = (probabilities * kept) @ value
    output.backward(wave(output))
    gradients = [each.grad for each in (query, key, value)]
    return [output.detach(), *(each for each in gradients if each is not None)]


def next_seed() -> torch.Tensor:
    """The seed that the next operation will draw from torch's generator, which is left unchanged."""
    state = torch.get_rng_state()
    seed = torch.empty(1, dtype=torch.int64).random_(-(2**63), None)  # all 64 bits of one draw
    torch.set_rng_state(state)
    return seed


def wave(output: torch.Tensor) -> torch.Tensor:
    return torch.arange(output.numel()).sin().view(output.shape).to(output.dtype)


def assert_near(ours: torch.Tensor, expected: torch.Tensor, kind: torch.dtype) -> None:
    """Assert a small error, relative to the norm of the tensor, as sums are rounded."""
    limit = 1e-5 if kind == torch.float32 else 1.5e-2
    assert ours.dtype == kind
    assert (ours.double() - expected).norm() <= limit * (expected.norm() + 1)


SHAPES = [
    (2, 3, 128, 128, 64),
    (1, 2, 7, 45, 16),
    (2, 1, 200, 300, 32),
    (1, 1, 1, 1, 16),
    (1, 2, 33, 2100, 80),
]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask_of", ["none", "causal", "keys", "whole", "float", "never"])
def test_values_and_gradients_match_fp64(
    ops: Any, shape: tuple[int, ...], kind: torch.dtype, mask_of: str
) -> None:
    inputs = make(*shape, kind)
    batch, heads, queries, keys, _ = shape
    if kind == torch.bfloat16 and not uses_ours(inputs):
        pytest.skip("this CPU has no AMX")
    mask = {
        "none": None,
        "causal": None,
        "keys": torch.rand(batch, 1, 1, keys) < 0.7,
        "whole": torch.rand(batch, heads, queries, keys) < 0.7,
        "float": torch.randn(queries, keys).to(kind),
        "never": torch.zeros(queries, keys, dtype=torch.bool),
    }[mask_of]
    causal = mask_of == "causal"
    seed = next_seed()
    with Calls() as calls:
        output = functional.scaled_dot_product_attention(*inputs, mask, P, causal)
        output.backward(wave(output))
    assert calls.ours == ["cpulaunch.attention.default", "cpulaunch.attention_backward.default"]
    expected = reference(ops, inputs, seed, mask, causal)
    for ours, right in zip([output.detach(), *(each.grad for each in inputs)], expected, strict=True):
        assert ours is not None
        assert_near(ours, right, kind)


def uses_ours(inputs: list[torch.Tensor], *arguments: Any, **options: Any) -> bool:
    with Calls() as calls:
        functional.scaled_dot_product_attention(*inputs, *arguments, **{"dropout_p": P, **options})
    return "cpulaunch.attention.default" in calls.names


def test_the_output_needs_no_copy_for_the_next_layer(ops: Any) -> None:
    output = functional.scaled_dot_product_attention(*make(2, 3, 5, 6, 16), dropout_p=P)
    assert output.transpose(1, 2).is_contiguous()


def test_second_derivatives_match_fp64(ops: Any) -> None:
    inputs = make(1, 2, 5, 7, 16)

    def penalty(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum(each.square().sum() for each in first), inputs))

    seed = next_seed()
    ours = penalty(functional.scaled_dot_product_attention(*inputs, dropout_p=P), inputs)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    kept = (ops.dropout(torch.ones(1, 2, 5, 32), seed, P)[..., :7] != 0) / (1 - P)
    output = ((wide[0] @ wide[1].transpose(2, 3) / 4).softmax(3) * kept) @ wide[2]
    for one, right in zip(ours, penalty(output, wide), strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-3, atol=1e-3)


def test_seeds_come_from_torchs_generator_and_do_not_depend_on_threads(ops: Any) -> None:
    inputs = make(2, 4, 40, 50, 32)
    outputs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(4)
        outputs.append(functional.scaled_dot_product_attention(*inputs, dropout_p=P))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(functional.scaled_dot_product_attention(*inputs, dropout_p=P), outputs[0])


def test_checkpoint_replays_the_attention_mask(ops: Any) -> None:
    inputs = make(1, 2, 30, 30, 16)
    gradients = []
    for through in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        torch.manual_seed(2)
        output = through(lambda *x: functional.scaled_dot_product_attention(*x, dropout_p=P), *inputs)
        gradients.append(torch.autograd.grad(output.square().sum(), inputs))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_autocast_runs_attention_in_bf16(ops: Any) -> None:
    inputs = make(1, 2, 30, 30, 16)
    with torch.autocast("cpu", torch.bfloat16):
        output = functional.scaled_dot_product_attention(*inputs, dropout_p=P)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in inputs)


def test_other_cases_are_left_to_torch(ops: Any) -> None:
    inputs = make(1, 2, 8, 8, 16)
    assert uses_ours(inputs)
    assert not uses_ours(inputs, dropout_p=0.0)
    assert not uses_ours([each.double() for each in inputs])
    assert not uses_ours([inputs[0], *(each.detach()[:, :1] for each in inputs[1:])], enable_gqa=True)
    assert not uses_ours(inputs, torch.zeros(8, 8, requires_grad=True))
    assert not uses_ours([each[0] for each in inputs])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not uses_ours(inputs)
    with pytest.raises(RuntimeError, match=r"Explicit attn_mask should not be set when is_causal"):
        uses_ours(inputs, torch.zeros(8, 8), is_causal=True)
    gradient = torch.func.grad(
        lambda q: functional.scaled_dot_product_attention(q, *inputs[1:], dropout_p=P).sum()
    )
    assert gradient(inputs[0].detach()).isfinite().all()


def test_without_gradients_nothing_is_saved(ops: Any) -> None:
    inputs = make(1, 2, 8, 8, 16)
    with torch.no_grad():
        assert uses_ours(inputs)
        assert not functional.scaled_dot_product_attention(*inputs, dropout_p=P).requires_grad


def test_forward_derivatives_behave_as_in_torch(ops: Any) -> None:
    def outcome() -> str:
        query, key, value = (each.detach() for each in make(1, 2, 8, 8, 16))
        with torch.autograd.forward_ad.dual_level():
            query = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
            try:
                output = functional.scaled_dot_product_attention(query, key, value, dropout_p=P)
            except (RuntimeError, NotImplementedError) as error:
                return str(error)
            tangent = torch.autograd.forward_ad.unpack_dual(output).tangent
            return f"a tangent of {tuple(tangent.shape)}"

    ours = outcome()
    ops.use(False)
    assert ours == outcome()


@pytest.mark.slow
def test_a_compiled_model_uses_the_kernel(ops: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: functional.scaled_dot_product_attention(*x, dropout_p=P), backend="aot_eager"
    )
    inputs = make(1, 2, 8, 8, 16)
    outputs = [compiled(*inputs) for _ in range(3)]  # a new mask in each step
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    outputs[0].sum().backward()
    assert all(each.grad is not None for each in inputs)


def test_torch_library_opcheck(ops: Any) -> None:
    inputs = make(1, 2, 8, 9, 16)
    tests = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        ops.attention.default, (*inputs, None, torch.tensor([7]), P, False, 0.25), test_utils=tests
    )
