"""Steps with torch's fused implementation compute the same as the script's own steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from cpulaunch.runtime.change.engines import native

MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.1),
    "momentum": MOMENTUM,
    "Adam": Adam,
    "AdamW": AdamW,
    "Adagrad": Adagrad,
}


def watched(optimizer: Optimizer) -> list[bool | None]:
    """Fuse the optimizer; return the list to which each step adds the first group's choice."""
    native.fuse(optimizer)
    choices: list[bool | None] = []
    optimizer.register_step_pre_hook(lambda each, *_: choices.append(each.param_groups[0]["fused"]))
    return choices


def trained(
    make: Callable[..., Optimizer], fuse: bool, weights: list[nn.Parameter], give: Callable[[int], Any]
) -> tuple[list[torch.Tensor], list[bool | None]]:
    """Return the parameters after four steps, to which ``give`` gives the gradients, and the choices."""
    optimizer = make(weights)
    choices = watched(optimizer) if fuse else []
    for step in range(4):
        optimizer.zero_grad()
        give(step)
        optimizer.step()
    return [weight.detach().clone() for weight in weights], choices


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(dtype))


def transposed(weight: nn.Parameter, step: int) -> None:
    weight.grad = (weight.detach().t().contiguous() * (step + 1)).t()


def expanded(weight: nn.Parameter, step: int) -> None:
    weight.grad = torch.full((1, 1), step + 1.0).expand(weight.shape)


def ordinary(weight: nn.Parameter, step: int) -> None:
    (weight * weight * (step + 1)).sum().backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("gives", "dtype", "used"),
    [
        (ordinary, torch.float32, True),
        (ordinary, torch.float64, True),
        (ordinary, torch.bfloat16, None),
        (ordinary, torch.float16, None),
        (transposed, torch.float32, None),
        (expanded, torch.float32, None),
    ],
)
def test_any_gradient_gives_the_same_weights(
    name: str, gives: Callable[[nn.Parameter, int], None], dtype: torch.dtype, used: bool | None
) -> None:
    found = []
    for fuse in (False, True):
        weight = parameter(8, 8, dtype=dtype)
        (after,), choices = trained(OPTIMIZERS[name], fuse, [weight], partial(gives, weight))
        found.append(after)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert choices == [used] * 4


def test_a_parameter_may_get_its_first_gradient_late() -> None:
    found = []
    for fuse in (False, True):
        first, late = parameter(4, 4), parameter(4, 4)

        def give(step: int, first: nn.Parameter = first, late: nn.Parameter = late) -> None:
            ordinary(first, step)
            if step > 1:
                ordinary(late, step)

        after, choices = trained(MOMENTUM, fuse, [first, late], give)
        found.append(torch.stack(after))
    torch.testing.assert_close(found[0], found[1])
    assert choices == [True, True, None, True]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_leaves_the_memory_around_a_parameter_alone(name: str) -> None:
    whole = torch.randn(6, 12)
    before = whole.clone()
    part = nn.Parameter(whole[:, :6])
    _, choices = trained(OPTIMIZERS[name], True, [part], partial(ordinary, part))
    assert torch.equal(whole[:, 6:], before[:, 6:])
    assert not torch.equal(whole[:, :6], before[:, :6])
    assert choices == [None] * 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_may_change_its_layout_between_steps(name: str) -> None:
    found = []
    for fuse in (False, True):
        torch.manual_seed(3)
        model, inputs = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)

        def give(step: int, model: nn.Conv2d = model, inputs: torch.Tensor = inputs) -> None:
            if step == 2:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            model(inputs).square().mean().backward()

        (weight, _), choices = trained(OPTIMIZERS[name], fuse, list(model.parameters()), give)
        found.append(weight)
    torch.testing.assert_close(found[0], found[1])
    assert choices == [True] * 4


def test_gradients_of_small_kernels_in_either_layout_are_fused() -> None:
    """Strides of dimensions of size 1 don't matter."""
    weight = parameter(4, 3, 1, 1)

    def give(step: int) -> None:
        weight.grad = torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last)
        weight.grad = weight.grad.as_strided((4, 3, 1, 1), (3, 1, 3, 3))

    assert trained(AdamW, True, [weight], give)[1] == [True] * 4


def test_sparse_gradients_are_left_to_the_script() -> None:
    model = nn.Embedding(6, 2, sparse=True)

    def give(step: int) -> None:
        model(torch.tensor([1, 2])).sum().backward()

    assert trained(partial(SGD, lr=0.1), True, list(model.parameters()), give)[1] == [None] * 4


@pytest.mark.parametrize("chosen", [{}, {"fused": False}, {"fused": True}, {"foreach": True}])
def test_a_checkpoint_has_the_choice_of_the_script(chosen: dict[str, bool]) -> None:
    weight = parameter(3, 3)
    plain = AdamW([weight], **chosen).state_dict()["param_groups"]
    optimizer = AdamW([weight], **chosen)
    choices = watched(optimizer)
    ordinary(weight, 1)
    optimizer.step()
    assert optimizer.state_dict()["param_groups"] == plain
    expected = chosen.get("fused") if chosen else True
    assert choices == [expected]


def test_loaded_states_get_the_layout_of_their_parameters() -> None:
    """In another layout, the fused implementation mixes them up."""
    torch.manual_seed(3)
    model, inputs = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    optimizer = AdamW(model.parameters())
    model(inputs).square().mean().backward()
    optimizer.step()
    found = []
    for fuse in (False, True):
        copied = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        again = AdamW(copied.parameters())
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if fuse:
            native.fuse(again)
        copied(inputs).square().mean().backward()
        again.step()
        found.append(copied.weight.detach().clone())
    torch.testing.assert_close(found[0], found[1])


def test_an_optimizer_is_changed_once() -> None:
    """So a script that calls `prepare` is not told again at the first step."""
    optimizer = AdamW([parameter(2, 2)])
    assert (native.fuse(optimizer), native.fuse(optimizer)) == (True, False)


def test_an_error_in_a_step_leaves_no_choice_behind() -> None:
    weight = parameter(3, 3)
    optimizer = AdamW([weight])
    choices = watched(optimizer)

    def fail(*_: object) -> None:
        raise RuntimeError("this step fails")

    handle = optimizer.register_step_pre_hook(fail)
    ordinary(weight, 1)
    with pytest.raises(RuntimeError, match="this step fails"):
        optimizer.step()
    handle.remove()
    optimizer.step()
    assert choices == [True, True]
    assert optimizer.param_groups[0]["fused"] is None
