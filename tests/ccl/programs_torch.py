"""Test programs for torch's features that use a group: DDP, FSDP2, checkpoints, object collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from programs import Groups


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(40, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.unused = torch.nn.Linear(3, 3)
        self.last = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def train_ddp(hook: str | None = None, unused: bool = False) -> list[list[float]]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    curves = []
    for group in (Groups.ccl, Groups.gloo):
        torch.manual_seed(1)
        net = Net()
        if not unused:
            del net.unused
        model = torch.nn.parallel.DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.01,
                                                          find_unused_parameters=unused)  # fmt: skip
        if hook:
            state: Any = group
            if "power" in hook:
                state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
            function = getattr(powerSGD_hook if "power" in hook else default_hooks, hook)
            # Without a GPU, DDP refuses the bf16 hook because of its name.
            renamed = lambda s, bucket, f=function: f(s, bucket)  # noqa: E731
            renamed.__annotations__ = function.__annotations__
            model.register_comm_hook(state, renamed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank() + 100)
        curve = []
        for _ in range(8):
            x, y = torch.randn(16, 40), torch.randint(0, 10, (16,))
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    return curves


def _losses(model: torch.nn.Module, data: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    curve = []
    for x in data:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        curve.append(total.item())
    return curve


def _network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Tanh(), torch.nn.Linear(500, 70))


def train_fsdp2() -> list[list[float]]:
    """The losses with memory allocated by the group, with ordinary memory, with gloo, and in one process."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(size * 4, 300, generator=generator) for _ in range(5)]
    curves = []
    for group, by_group in ((Groups.ccl, True), (Groups.ccl, False), (Groups.gloo, False)):
        sharded = _network()
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in (sharded[0], sharded[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for module in (sharded, sharded[0], sharded[2]):
            module.set_allocate_memory_from_process_group_for_comm(by_group)
        curves.append(_losses(sharded, [batch.chunk(size)[rank] for batch in batches]))
    return [*curves, _losses(_network(), batches)]


def checkpoint(directory: str) -> bool:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(60.0).reshape(12, 5)
    state = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "plain": whole * 2}
    dcp.save(state, checkpoint_id=directory)
    loaded = {"sharded": distribute_tensor(torch.zeros(12, 5), mesh, [Shard(0)]), "plain": torch.zeros(12, 5)}
    dcp.load(loaded, checkpoint_id=directory)
    return bool((loaded["sharded"].full_tensor() == whole).all() and (loaded["plain"] == whole * 2).all())


def objects() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank * 100})
    broadcast = ["from 1", 1] if rank == 1 else [None, None]
    dist.broadcast_object_list(broadcast, src=1)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [r * 10 for r in range(size)] if rank == 0 else None, src=0)
    return [gathered, broadcast, scattered]
