"""Dropout: masks, derivatives, cases left to torch, and torch's transforms of functions with dropout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cpulaunch.ccl import installed
from kernels.conftest import Calls

LIMIT = 300  # seconds


def philox(seed: int, counters: Any, rounds: int = 7) -> list[Any]:
    """The four words of each counter, by the paper's definition."""
    x = [counters & 0xFFFFFFFF, counters >> 32, numpy.zeros_like(counters), numpy.zeros_like(counters)]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(rounds):
        products = x[0] * numpy.uint64(0xD2511F53), x[2] * numpy.uint64(0xCD9E8D57)
        low, high = [p & 0xFFFFFFFF for p in products], [p >> numpy.uint64(32) for p in products]
        x = [high[1] ^ x[1] ^ numpy.uint64(keys[0]), low[1], high[0] ^ x[3] ^ numpy.uint64(keys[1]), low[0]]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def numbers(seed: int, size: int) -> Any:
    """Return the random numbers of a tensor's elements, in the order of philox.hpp."""
    blocks = -(-size // 32)
    words = philox(seed, numpy.arange(8 * blocks, dtype=numpy.uint64))
    first, second = (numpy.stack(pair, axis=1).reshape(blocks, 16) for pair in (words[:2], words[2:]))
    return numpy.concatenate([first, second], axis=1).reshape(-1)[:size]


def test_the_reference_gives_the_known_answers_of_random123() -> None:
    zero = numpy.zeros(1, dtype=numpy.uint64)
    assert [int(word[0]) for word in philox(0, zero)] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert [int(word[0]) for word in philox(0, zero, 10)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000, 100_001])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_a_mask_equals_the_mask_of_the_reference(ops: Any, size: int, p: float) -> None:
    for seed in (0, 1 << 40, -1):
        kept = ops.dropout(torch.ones(size), torch.tensor([seed]), p)
        expected = numbers(seed % 2**64, size) >= round(p * 2**32)
        assert torch.equal(kept != 0, torch.from_numpy(expected))
        assert torch.equal(kept[kept != 0], torch.full_like(kept[kept != 0], 1 / (1 - p)))


MASKS = """
import hashlib, torch
from cpulaunch.kernels import load
ops = load.load()
digest = hashlib.sha256()
for kind in (torch.float32, torch.bfloat16):
    for size in (5, 64, 70_001):
        x = (torch.arange(size) % 97 - 48) / 7  # torch's own random numbers differ by vector unit
        digest.update(ops.dropout(x.to(kind), torch.tensor([3]), 0.3).float().numpy().tobytes())
print(ops.vector_unit(), digest.hexdigest())
"""


def test_all_vector_units_compute_the_same(ops: Any) -> None:
    """A variable of torch selects each of this CPU's vector units."""
    seen = {}
    for capability in ("default", "avx2", "avx512"):
        done = subprocess.run(
            [sys.executable, "-c", MASKS],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stderr
        unit, digest = done.stdout.split()
        seen[unit] = digest
    assert "portable" in seen
    assert len(set(seen.values())) == 1


def test_masks_depend_on_the_seed_and_not_on_threads(ops: Any) -> None:
    x = torch.ones(1 << 20)
    masks = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(11)
        masks.append([functional.dropout(x, 0.2) for _ in range(2)])
    for first, second in masks:
        assert torch.equal(first, masks[0][0])
        assert torch.equal(second, masks[0][1])
    assert not torch.equal(*masks[0])
    torch.manual_seed(12)
    assert not torch.equal(functional.dropout(x, 0.2), masks[0][0])


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_are_independent_across_positions_and_steps(ops: Any, p: float) -> None:
    """Means and correlations are within five standard deviations of those of independent bits."""
    torch.manual_seed(5)
    size = 1 << 21
    deviation = size**-0.5
    steps = [(functional.dropout(torch.ones(size), p) == 0).double() for _ in range(4)]
    bits = [(step - p) / (p * (1 - p)) ** 0.5 for step in steps]
    for step in bits:
        assert abs(step.mean()) < 5 * deviation
        for lag in (*range(1, 70), 96, 128, 256, 768, 1024, 4096, 1 << 20):
            assert abs((step[lag:] * step[:-lag]).mean()) < 5 * (size - lag) ** -0.5, lag
    for i, one in enumerate(bits):
        for other in bits[:i]:
            assert abs((one * other).mean()) < 5 * deviation


def test_masks_of_neighbouring_seeds_are_independent(ops: Any) -> None:
    size = 1 << 18
    ones = torch.ones(size)
    bits = [ops.dropout(ones, torch.tensor([seed]), 0.5) - 1 for seed in (0, 1, 2, 1 << 32, -1)]
    for i, one in enumerate(bits):
        for other in bits[:i]:
            assert abs((one * other).mean()) < 5 * size**-0.5


def mask_of(ops: Any, x: torch.Tensor, p: float) -> torch.Tensor:
    """Return the mask, in fp64, that dropout will apply next to a tensor like ``x``.

    The generator is left unchanged.
    """
    state = torch.get_rng_state()
    mask = functional.dropout(torch.ones(x.shape), p) != 0
    torch.set_rng_state(state)
    return mask.double() / (1 - p)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_values_and_gradients_match_fp64_rounded_once(ops: Any, kind: torch.dtype) -> None:
    x = torch.randn(37, 129).to(kind).requires_grad_()
    weights = torch.randn(37, 129).to(kind)
    mask = mask_of(ops, x, 0.3)
    y = functional.dropout(x, 0.3)
    (gradient,) = torch.autograd.grad(y, x, weights)
    error = 2**-23 if kind == torch.float32 else 2**-8
    torch.testing.assert_close(y.double(), x.detach().double() * mask, rtol=error, atol=0)
    torch.testing.assert_close(gradient.double(), weights.double() * mask, rtol=error, atol=0)
    assert y.dtype == gradient.dtype == kind


def test_the_expanded_gradient_of_a_sum_is_accepted(ops: Any) -> None:
    x = torch.randn(8, 9, requires_grad=True)
    mask = mask_of(ops, x, 0.5)
    functional.dropout(x, 0.5).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.double(), mask)


def test_second_derivatives(ops: Any) -> None:
    x = torch.randn(64, requires_grad=True)
    mask = mask_of(ops, x, 0.5)
    y = functional.dropout(x, 0.5) ** 3
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    values = x.detach().double()
    torch.testing.assert_close(first.detach().double(), 3 * values**2 * mask**3, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second.double(), 6 * values * mask**3, rtol=1e-5, atol=1e-6)


def test_non_finite_values_stay_non_finite_as_in_torch(ops: Any) -> None:
    x = torch.tensor([float("nan"), float("inf")]).repeat(500)
    y = functional.dropout(x, 0.5)
    assert not y.isfinite().any()
    assert y[::2].isnan().all()


@pytest.mark.parametrize(
    "x",
    [torch.randn(8, 6).t(), torch.randn(4, 4, dtype=torch.float64), torch.randn(4).half(), torch.empty(0, 3),
     torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)],
    ids=["transposed", "fp64", "fp16", "empty", "channels_last"],
)  # fmt: skip
def test_other_tensors_are_left_to_torch(ops: Any, x: torch.Tensor) -> None:
    with Calls() as calls:
        y = functional.dropout(x, 0.5)
    assert calls.ours == []
    assert y.dtype == x.dtype
    assert y.shape == x.shape


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (1.0, True), (0.5, False)])
def test_other_probabilities_are_left_to_torch(ops: Any, p: float, training: bool) -> None:
    x = torch.randn(9)
    with Calls() as calls:
        y = functional.dropout(x, p, training)
    assert calls.ours == []
    assert torch.equal(y, x * 0 if p == 1 else x)


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_errors_are_the_same_as_in_torch(ops: Any, p: float) -> None:
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        functional.dropout(torch.ones(3), p)
    with pytest.raises(RuntimeError, match="dropout probability has to be between 0 and 1"):
        torch.dropout(torch.ones(3), p, True)


class Tagged(torch.Tensor):
    """A subclass of Tensor, as libraries define them."""


def test_subclasses_are_left_to_torch(ops: Any) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    for x in (TwoTensor(torch.randn(5), torch.randn(5)), torch.randn(5).as_subclass(Tagged)):
        assert type(functional.dropout(x, 0.5)) is type(x)


def test_dropout_is_left_to_torch_when_the_kernels_are_off(ops: Any) -> None:
    ops.use(False)
    with Calls() as calls:
        functional.dropout(torch.randn(4), 0.5)
    assert calls.ours == []
    ops.use(True)
    with Calls() as calls:
        functional.dropout(torch.randn(4), 0.5)
    assert calls.ours == ["cpulaunch.dropout.default"]


def test_forward_derivatives_are_left_to_torch(ops: Any) -> None:
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(500), torch.full((500,), 3.0))
        y, tangent = torch.autograd.forward_ad.unpack_dual(functional.dropout(x, 0.5))
    assert torch.equal(tangent, 3 * y)


def test_dropout_without_gradients_uses_the_kernel(ops: Any) -> None:
    with torch.no_grad(), Calls() as calls:
        y = functional.dropout(torch.ones(9, requires_grad=True), 0.5)
    assert calls.ours == ["cpulaunch.dropout.default"]
    assert not y.requires_grad


def test_checkpoint_replays_the_mask(ops: Any) -> None:
    x = torch.randn(300, requires_grad=True)
    for reentrant in (True, False):
        x.grad = None
        y = checkpoint(lambda x: functional.dropout(x, 0.5) * 2, x, use_reentrant=reentrant)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad != 0, y != 0)


def test_functional_transforms_are_left_to_torch(ops: Any) -> None:
    x = torch.randn(6, 50)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5).sum()

    gradient = torch.func.grad(loss)(x)
    assert set(gradient.unique().tolist()) == {0.0, 2.0}
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(loss)(x)
    rows = torch.vmap(torch.func.grad(loss), randomness="different")(x)
    assert not torch.equal(rows[0], rows[1])
    rows = torch.vmap(torch.func.grad(loss), randomness="same")(x)
    assert torch.equal(rows[0], rows[1])
    _, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
    assert tangent % 2 == 0


@pytest.mark.slow
def test_a_compiled_graph_draws_a_new_mask_in_each_step(ops: Any) -> None:
    torch._dynamo.reset()

    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x.sin(), 0.5) + functional.dropout(x.sin(), 0.5) * 8

    compiled = torch.compile(step, fullgraph=True)
    x = torch.full((1000,), 0.5, requires_grad=True)
    masks = []
    for _ in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            y = compiled(x)
        assert "cpulaunch::dropout" in {event.key for event in profiler.key_averages()}
        (gradient,) = torch.autograd.grad(y.sum(), x)
        unit = 2 * torch.tensor(0.5).sin()
        torch.testing.assert_close(gradient, y.detach() / torch.tensor(0.5).tan(), rtol=1e-4, atol=1e-4)
        levels = (y.detach() / unit).round()
        assert set(levels.tolist()) == {0, 1, 8, 9}  # two masks in one graph
        masks.append(levels)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
    torch.manual_seed(1)
    first = compiled(x)
    torch.manual_seed(1)
    assert torch.equal(compiled(x), first)


@pytest.mark.slow
@pytest.mark.repeats
def test_a_compiled_transform_is_left_to_torch(ops: Any) -> None:
    torch._dynamo.reset()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5).sum()

    compiled = torch.compile(torch.vmap(torch.func.grad(loss), randomness="different"), backend="aot_eager")
    rows = compiled(torch.randn(4, 80))
    assert set(rows.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(rows[0], rows[1])


def test_torch_library_opcheck(ops: Any) -> None:
    """torch's own check of schemas, fake tensors and autograd registrations."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for x in (torch.randn(5, 3, requires_grad=True), torch.randn(6).bfloat16(), torch.randn(4, 6).t()):
        torch.library.opcheck(ops.dropout.default, (x, torch.tensor([3]), 0.5), test_utils=tests)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_use_dropout(ops: Any) -> None:
    module = torch.jit.script(nn.Sequential(nn.Linear(20, 400), nn.Dropout(0.5)))
    y = module(torch.randn(3, 20))
    assert 0.3 < (y == 0).double().mean() < 0.7
    assert (module.eval()(torch.randn(3, 20)) != 0).all()


def test_traced_modules_and_symbolic_graphs_have_dropout(ops: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(x, 0.5, self.training)

    graph = torch.fx.symbolic_trace(Model())
    y = graph(torch.ones(500))
    assert 0.3 < (y == 0).double().mean() < 0.7


def test_torchs_own_callers_of_dropout_use_the_kernel(ops: Any) -> None:
    query = torch.randn(16, 3, 8)
    with Calls() as calls:
        nn.MultiheadAttention(8, 2, dropout=0.5)(query, query, query)
        nn.LSTM(8, 8, num_layers=2, dropout=0.5)(torch.randn(5, 2, 8))
    assert calls.ours == ["cpulaunch.dropout.default"] * 2


DROPS = """
#include <cstdio>
#include "vector.cpp"

int main() {
  float from[1000], to[1000];
  for (int i = 0; i < 1000; ++i) from[i] = i;
  cpulaunch::kernels::portable.dropout_float(from, to, 0, 32, 1000, {0x123456789abcdefu, 1u << 30, 1.5f});
  for (float each : to) printf("%g ", each);
}
"""


def test_aarch64_computes_the_same(tmp_path: Path) -> None:
    compilers = {"g++": (), "aarch64-linux-gnu-g++": ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")}
    missing = [tool for tool in ("qemu-aarch64", *compilers) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"without {', '.join(missing)}")
    (source := tmp_path / "drops.cpp").write_text(DROPS)
    printed = []
    for compiler, emulator in compilers.items():
        program = tmp_path / f"drops-{compiler}"
        flags = ("-O2", "-std=c++17", "-DCPULAUNCH_VECTOR=portable", f"-I{installed.KERNELS}")
        subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True, timeout=LIMIT)
        done = subprocess.run(
            [*emulator, str(program)], check=True, timeout=LIMIT, capture_output=True, text=True
        )
        printed.append(done.stdout.split())
    assert len(printed[0]) == 1000
    assert printed[0] == printed[1]
