"""DDP models with one of our communication hooks.

This module doesn't use ``from __future__ import annotations``, because DDP checks the annotations of hooks.
"""

import copy
import gc
import io
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cpulaunch.runtime.change import comm_hooks
from cpulaunch.runtime.distributed import DataParallel


@pytest.fixture
def model() -> Iterator[DataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DataParallel(nn.Linear(2, 2))
    comm_hooks.average_by(model, comm_hooks.average_in_bf16)
    yield model
    dist.destroy_process_group()


def doubled(state: list[str], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.append("called")
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


def step(model: nn.Module) -> list[float]:
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    return [float(parameter.grad.sum()) for parameter in model.parameters() if parameter.grad is not None]


def test_a_model_can_be_saved_as_a_whole_and_copied(model: DataParallel) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert step(other) == step(model) == [4, 2]
        calls: list[str] = []
        other.register_comm_hook(calls, doubled)
        assert step(other) == [8, 4]
        assert step(model) == [4, 2]
        assert calls == ["called"]


def test_a_scripts_hook_replaces_ours_once(model: DataParallel) -> None:
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, "not a hook")
    model.register_comm_hook([], doubled)
    assert step(model) == [8, 4]
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook([], doubled)


def test_a_model_is_freed_with_its_last_reference() -> None:
    def freed(*, hook: bool) -> bool:
        model = DataParallel(nn.Linear(2, 2))
        if hook:
            comm_hooks.average_by(model, comm_hooks.average_in_bf16)
        reference = weakref.ref(model)
        del model
        return reference() is None

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()
    try:
        assert freed(hook=True) == freed(hook=False)
    finally:
        gc.enable()
        dist.destroy_process_group()
