"""Test programs for functional collectives, DTensors and tensor parallelism under torch.compile."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from programs import Groups
from torch import nn


def _collectives(numbers: torch.Tensor, group: Any) -> list[torch.Tensor]:
    from torch.distributed import _functional_collectives as functional

    size = dist.get_world_size(group)
    summed = functional.all_reduce(numbers * 2, "sum", group)
    averaged = functional.all_reduce(numbers, "avg", group) if group is Groups.ccl else summed / (2 * size)
    gathered = functional.all_gather_tensor(numbers + 1, 0, group)
    part = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
    exchanged = functional.all_to_all_single(gathered, None, None, group)
    sent = functional.broadcast(numbers + 3, 1, group)
    several = functional.all_reduce_coalesced([numbers, numbers * 3], "max", group)
    both = functional.all_gather_into_tensor_coalesced([numbers, sent], group)
    parts = functional.reduce_scatter_tensor_coalesced(both, "sum", [0, 0], group)
    return [summed, averaged, gathered, part, exchanged, sent, *several, *both, *parts]


def functional_collectives(compiler: str | None) -> str:
    """Compiled functional collectives give the same results as gloo without compilation."""
    numbers = torch.arange(24.0).view(12, 2) + 100 * dist.get_rank()
    gloos = _collectives(numbers, Groups.gloo)

    def ours(numbers: torch.Tensor) -> list[torch.Tensor]:
        return [each * 1 for each in _collectives(numbers, Groups.ccl)]

    run = torch.compile(ours, backend=compiler, fullgraph=True) if compiler else ours
    for _ in range(2):
        for number, (got, expected) in enumerate(zip(run(numbers), gloos, strict=True)):
            torch.testing.assert_close(got, expected, msg=lambda text, n=number: f"{n}: {text}")
    return "ok"


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _tensor_parallel(mesh: Any, compiler: str | None) -> list[torch.Tensor]:
    """The output, and the gradients of all parameters and of the input."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(7)
    model = parallelize_module(Perceptron(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    run = torch.compile(model, backend=compiler, fullgraph=True) if compiler else model
    x = torch.randn(5, 24, requires_grad=True)
    output = run(x)
    output.square().sum().backward()
    return [output, x.grad, *(each.grad.full_tensor() for each in model.parameters())]


def _distributed(mesh: Any, compiler: str | None) -> list[torch.Tensor]:
    """Redistribute DTensors in many ways; return the results and the gradient."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(8)
    first = distribute_tensor(torch.randn(12, 24), mesh, [Shard(0)]).requires_grad_()
    second = distribute_tensor(torch.randn(24, 12), mesh, [Shard(0)])

    def multiply(first: Any, second: Any) -> list[torch.Tensor]:
        product = first.redistribute(placements=[Shard(1)]) @ second  # a partial sum
        whole = product.redistribute(placements=[Replicate()])
        return [whole.to_local(), product.redistribute(placements=[Shard(1)]).to_local()]

    run = torch.compile(multiply, backend=compiler, fullgraph=True) if compiler else multiply
    whole, part = run(first, second)
    (whole.square().sum() + part.sum()).backward()
    return [whole, part, first.grad.full_tensor()]


def dtensors(compiler: str | None) -> str:
    """DTensors and tensor parallelism, compiled, give the same results on ccl as on gloo."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    meshes = [init_device_mesh("cpu", (dist.get_world_size(),)), DeviceMesh.from_group(Groups.gloo, "cpu")]
    for program in (_tensor_parallel, _distributed):
        ours, gloos = (program(mesh, how) for mesh, how in zip(meshes, (compiler, None), strict=True))
        for number, (got, expected) in enumerate(zip(ours, gloos, strict=True)):
            name = f"{program.__name__} {number}"
            torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")
    return "ok"
