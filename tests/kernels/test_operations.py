"""gelu, cross entropy, casts and transposed products: values against fp64, and cases left to torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernels.conftest import Calls

KINDS = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("kind", KINDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["none", "tanh"])
def test_gelu_and_its_gradient_match_fp64(ops: Any, kind: torch.dtype, way: str) -> None:
    x = torch.linspace(-12, 12, 10_007).to(kind).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, right = functional.gelu(x, approximate=way), functional.gelu(wide, approximate=way)
    weights = torch.linspace(-2, 3, 10_007).to(kind)
    (gradient,) = torch.autograd.grad(y, x, weights)
    (right_gradient,) = torch.autograd.grad(right, wide, weights.double())
    assert y.dtype == gradient.dtype == kind
    torch.testing.assert_close(y.double(), right, rtol=ROUNDING[kind], atol=1e-6)
    torch.testing.assert_close(gradient.double(), right_gradient, rtol=ROUNDING[kind], atol=4e-6)
    assert "gelu with tanh" in ops.replaced() or way == "none"


@pytest.mark.parametrize("kind", KINDS, ids=["fp32", "bf16"])
def test_gelu_of_extreme_values(ops: Any, kind: torch.dtype) -> None:
    x = torch.tensor([float("inf"), float("nan"), 0.0, 100.0, 1e30, -100.0, -1e38, -float("inf")] * 7).to(
        kind
    )
    y = functional.gelu(x.requires_grad_(), approximate="tanh")
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y[1].isnan()
    assert torch.equal(y[[0, 2, 3, 4]], x[[0, 2, 3, 4]])
    assert (y[5:8].abs() < 1e-30).all()
    assert (gradient[5:8].abs() < 1e-30).all()


def test_second_derivatives_of_gelu(ops: Any) -> None:
    x = torch.linspace(-3, 3, 20, dtype=torch.float32, requires_grad=True)
    (first,) = torch.autograd.grad(functional.gelu(x, approximate="tanh").sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    wide = x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(functional.gelu(wide, approximate="tanh").sum(), wide, create_graph=True)
    (right,) = torch.autograd.grad(first.sum(), wide)
    torch.testing.assert_close(second.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "x",
    [torch.randn(8, 6).t(), torch.randn(9, dtype=torch.float64), torch.randn(9).half(), torch.empty(0, 3)],
    ids=["transposed", "fp64", "fp16", "empty"],
)
def test_gelu_of_other_tensors_is_left_to_torch(ops: Any, x: torch.Tensor) -> None:
    ours = functional.gelu(x, approximate="tanh")
    ops.use(False)
    assert torch.equal(ours, functional.gelu(x, approximate="tanh"))


def classes(kind: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    logits = (torch.randn(37, 1003) * 5).to(kind).requires_grad_()
    target = torch.randint(1003, (37,))
    target[::5] = -100
    return logits, target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_and_its_gradient_match_fp64(ops: Any, reduction: str) -> None:
    logits, target = classes()
    wide = logits.detach().double().requires_grad_()
    with Calls() as calls:
        loss = functional.cross_entropy(logits, target, reduction=reduction)
        loss.square().sum().backward()
    right = functional.cross_entropy(wide, target, reduction=reduction)
    right.square().sum().backward()
    assert calls.ours == ["cpulaunch.cross_entropy.default", "cpulaunch.cross_entropy_backward.default"]
    torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=1e-5)
    assert logits.grad is not None
    assert wide.grad is not None
    assert (logits.grad.double() - wide.grad).norm() < 1e-5 * wide.grad.norm()


@pytest.mark.parametrize("shift", [0, 1e3, 1e5, 1e7, -1e9])
def test_large_logits_keep_the_gradients_of_cross_entropy_exact(ops: Any, shift: float) -> None:
    logits, target = (classes()[0].detach() + shift).requires_grad_(), classes()[1]
    wide = logits.detach().double().requires_grad_()
    (gradient,) = torch.autograd.grad(functional.cross_entropy(logits, target), logits)
    (right,) = torch.autograd.grad(functional.cross_entropy(wide, target), wide)
    assert (gradient.double() - right).norm() < 1e-6 * right.norm()


def test_cross_entropy_without_counted_rows_is_left_to_torch(ops: Any) -> None:
    logits, target = classes()
    assert functional.cross_entropy(logits, torch.full_like(target, -100)).isnan()
    assert functional.cross_entropy(logits, torch.full_like(target, 7), ignore_index=7, reduction="sum") == 0


def test_a_target_out_of_bounds_is_the_same_error_as_in_torch(ops: Any) -> None:
    logits, target = classes()
    with pytest.raises(IndexError, match=r"Target 1003 is out of bounds"):
        functional.cross_entropy(logits, target.fill_(1003))


def test_second_derivatives_of_cross_entropy(ops: Any) -> None:
    def penalty(logits: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(logits, target)
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), logits)
        return second

    logits, target = classes()
    wide = logits.detach().double().requires_grad_()
    torch.testing.assert_close(penalty(logits).double(), penalty(wide), rtol=1e-4, atol=1e-7)


def test_other_cross_entropies_are_left_to_torch(ops: Any) -> None:
    logits, target = classes()
    for arguments, options in (
        ((logits.double(), target), {}),
        ((logits.bfloat16(), target), {}),
        ((logits, target), {"label_smoothing": 0.1}),
        ((logits, target), {"weight": torch.ones(1003)}),
        ((logits, logits.softmax(1)), {}),
        ((logits[:, :20], target.clamp(max=19)), {}),
        ((logits.t().contiguous().t(), target), {}),
        ((logits.view(1, 1003, 37), target.view(1, 37)), {}),
    ):
        with Calls() as calls:
            functional.cross_entropy(*arguments, **options)  # type: ignore[arg-type]
        assert calls.ours == []


def test_transforms_of_cross_entropy_are_left_to_torch(ops: Any) -> None:
    logits, target = classes()
    values = logits.detach()
    gradient = torch.func.grad(lambda x: functional.cross_entropy(x, target))(values)
    (ours,) = torch.autograd.grad(functional.cross_entropy(logits, target), logits)
    torch.testing.assert_close(gradient, ours)
    _, tangent = torch.func.jvp(
        lambda x: functional.cross_entropy(x, target), (values,), (torch.ones_like(values),)
    )
    assert tangent.abs() < 1e-4
    rows = torch.vmap(lambda x, t: functional.cross_entropy(x, t))(
        values[1:5].unsqueeze(1), target[1:5].unsqueeze(1)
    )
    torch.testing.assert_close(rows, functional.cross_entropy(values[1:5], target[1:5], reduction="none"))


def test_cross_entropy_without_gradients_and_in_checkpoints(ops: Any) -> None:
    logits, target = classes()
    with torch.no_grad():
        loss = functional.cross_entropy(logits, target)
    assert not loss.requires_grad
    again = checkpoint(functional.cross_entropy, logits, target, use_reentrant=False)
    assert torch.equal(again.detach(), loss)
    again.backward()
    assert logits.grad is not None


def test_torch_library_opcheck(ops: Any) -> None:
    logits, target = classes()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.cross_entropy.default, (logits, target, -100), test_utils=tests)


def test_large_casts_are_exact(ops: Any) -> None:
    values = torch.randn(8_400_003).bfloat16()
    values[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    expected = (values.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    assert torch.equal(values.float().view(torch.int32), expected.view(torch.int32))
    assert "large casts" in ops.replaced()
    (gradient,) = torch.autograd.grad(values.requires_grad_().float().sum(), values)
    assert torch.equal(gradient, torch.ones_like(gradient))
    grid = values.detach()[3:8_390_003].view(4195, 2000)
    assert torch.equal(grid.t().float().t(), grid.float())


@pytest.mark.parametrize(("rows", "inner", "columns"), [(768, 1024, 768), (97, 65, 300), (200, 129, 257)])
def test_products_with_transposed_matrices_match_fp64(ops: Any, rows: int, inner: int, columns: int) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(inner, rows + 5).bfloat16()[:, :rows], torch.randn(inner, columns).bfloat16()
    expected = left.double().t() @ right.double()
    out = torch.empty(rows, columns, dtype=torch.bfloat16)
    torch.mm(left.t(), right, out=out)
    for ours in (left.t() @ right, out):
        assert (ours.double() - expected).norm() < 2**-8 * expected.norm()
    amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    assert ("products of transposed matrices" in ops.replaced()) == amx


def test_wrong_sizes_are_the_same_errors_as_in_torch(ops: Any) -> None:
    left = torch.ones(128, 128).bfloat16().t()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        left @ torch.ones(129, 300).bfloat16()
    with pytest.raises(RuntimeError, match="same dtype"):
        left @ torch.ones(128, 300)


TRAIN = """
import sys, torch
from torch import nn
from torch.nn import functional
from cpulaunch.runtime.change import kernels
kernels.enable()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(500, 256), nn.Linear(256, 512), nn.GELU("tanh"), nn.Dropout(0.1), nn.Linear(512, 500))
x = torch.arange(512).reshape(4, 128) % 500
with torch.autocast("cpu", torch.bfloat16):
    loss = functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
loss.backward()
print(torch.ops.cpulaunch.vector_unit(), loss.item(), sum(p.grad.double().norm().item() for p in model.parameters()))
"""


def test_vector_units_agree_and_nothing_warns(ops: Any) -> None:
    """torch doesn't print its warning about overridden kernels when they are loaded and used."""
    seen = {}
    for capability in ("default", "avx2", "avx512"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", TRAIN],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "verrid" not in done.stderr
        unit, loss, norm = done.stdout.split()
        seen[unit] = (float(loss), float(norm))
    assert "portable" in seen
    for pair in seen.values():
        assert pair == pytest.approx(seen["portable"], rel=1e-2)


def test_torchs_operations_are_back_when_the_kernels_are_off(ops: Any) -> None:
    x = torch.linspace(-5, 5, 1000)
    ours = functional.gelu(x, approximate="tanh")
    ops.use(False)
    torchs = functional.gelu(x, approximate="tanh")
    ops.use(True)
    assert torch.equal(functional.gelu(x, approximate="tanh"), ours)
    assert not torch.equal(ours, torchs)  # they differ in the last bits
    torch.testing.assert_close(ours, torchs)


@pytest.mark.slow
def test_a_compiled_model_trains_like_an_eager_model(ops: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(400, 128), nn.Linear(128, 256), nn.GELU("tanh"), nn.Linear(256, 400))
    x = torch.arange(390).reshape(3, 130)

    def gradients(model: Any) -> list[torch.Tensor]:
        loss = functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        return list(torch.autograd.grad(loss, list(model.parameters())))

    eager, compiled = gradients(model), gradients(torch.compile(model, backend="aot_eager"))
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
