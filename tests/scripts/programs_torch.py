"""Ordinary scripts with torch alone, which behave alike under torchrun and cpulaunch.

Each function is a rank's program, started as ``programs_torch.py NAME ARGS``; `report` prints what it returns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZE = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def weights(parameters: Any) -> list[float]:
    """Return a number for each parameter, whole or sharded.

    After the same training, they are equal within rounding.
    """
    from torch.distributed.tensor import DTensor

    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in parameters)
    return [round(p.detach().double().abs().sum().item(), 4) for p in whole]


def train(net: nn.Module, rank: int, steps: int = 3, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(steps):
        net(batch(step, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net.parameters())


def sharded() -> dict:
    """FSDP2, tensor parallelism, a pipeline and checkpoints on meshes; nothing calls init_process_group."""
    from torch.distributed.checkpoint import async_save, load
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",))
    rank = dist.get_rank()
    net = fully_shard(model(), mesh=mesh)
    result = {"fsdp2": train(net, rank), "backend": dist.get_backend_config()}

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    result["tensor parallel"] = train(parallelize_module(model(), mesh, plan), 0)
    square = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("replicate", "shard"))
    result["hybrid"] = train(fully_shard(model(), mesh=square), rank)

    directory = Path("checkpoint").resolve()
    async_save(get_model_state_dict(net), checkpoint_id=directory).result()
    other = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), mesh=mesh)
    state = get_model_state_dict(other)
    load(state, checkpoint_id=directory)
    set_model_state_dict(other, state)
    result["loaded"] = weights(other.parameters()) == weights(net.parameters())
    result["pipeline"] = pipeline(rank)
    return result


def pipeline(rank: int) -> list[float]:
    """Two stages, which send activations and gradients to each other."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = [nn.Linear(8, 8), nn.Linear(8, 4)][rank]
    torch.manual_seed(1)
    for parameter in stage.parameters():
        nn.init.normal_(parameter)
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, SIZE, torch.device("cpu")),
        2,
        loss_fn=lambda out, target: out.pow(2).mean(),
    )
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(batch(0, 0))
    else:
        schedule.step(target=torch.zeros(6, 4), losses=losses)
    return weights([parameter.grad for parameter in stage.parameters()])


def older() -> dict:
    """Techniques older than meshes: FSDP version 1, optimizers that shard their state or average models, RPC."""
    from torch.distributed import rpc
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result = {}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        net = FullyShardedDataParallel(model(), sharding_strategy=strategy, device_id=torch.device("cpu"))
        result[strategy.name] = train(net, rank)

    net = DistributedDataParallel(model())
    shared = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    train(net, rank, optimizer=shared)
    shared.consolidate_state_dict(to=0)
    result["ZeroRedundancyOptimizer"] = weights(net.parameters())
    net = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    result["PowerSGD"] = train(net, rank, steps=4)
    net = model()
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    local = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), averager)
    result["local SGD"] = train(net, rank, steps=4, optimizer=local)
    dist.destroy_process_group()

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=SIZE)
    result["RPC"] = rpc.rpc_sync(f"worker{1 - rank}", torch.add, (torch.ones(2), rank)).tolist()
    rpc.shutdown()
    return result


def named(*backends: str) -> dict:
    """The backend names that groups report to a script that names a backend, and whether they behave like
    that backend."""
    result = {}
    for backend in backends:
        dist.init_process_group(*([] if backend == "none" else [backend]))
        half, like = dist.new_group([0, 1]), dist.new_group(backend=dist.get_backend())
        total = torch.ones(())
        for group in (None, half, like):
            dist.all_reduce(total, group=group)
        if dist.get_backend() == "gloo":
            dist.monitored_barrier()
        try:
            import cpulaunch

            real = cpulaunch.backend()
        except ImportError:
            real = None
        result[backend] = [dist.get_backend(group) for group in (None, half, like)], real, total.item()
        dist.destroy_process_group()
    return result


class Embedded(nn.Module):
    """A sparse embedding and a dense layer, as in DLRM."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(20, 8, sparse=sparse)
        self.top = nn.Linear(8, 1)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.top(self.bag(indices))


def sparse() -> dict:
    """Sparse gradients with each optimizer that supports them, gradients that become sparse later, and uneven
    inputs."""
    from torch.distributed.algorithms import Join

    dist.init_process_group("gloo")
    kinds = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    }
    result = {}
    for name, make in kinds.items():
        for turns in (False, True):
            net = Embedded(sparse=not turns)
            ddp = DistributedDataParallel(net)
            optimizer = make(ddp.parameters())
            for step in range(3):
                if turns and step == 1:
                    net.bag.sparse = True
                    ddp = DistributedDataParallel(net)
                indices = torch.tensor([[1, 2 + step], [dist.get_rank(), 7]])
                ddp(indices).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            result[f"{name}{', later' if turns else ''}"] = weights(net.parameters())
    dense = DistributedDataParallel(model())
    with Join([dense]):  # ranks with different numbers of batches
        for step in range(2 + dist.get_rank()):
            dense(batch(step, 0)).pow(2).mean().backward()
    result["Join"] = weights(p.grad for p in dense.parameters())
    net = Embedded()
    optimizer = torch.optim.SparseAdam(net.bag.parameters())
    net(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    result["SparseAdam"] = weights(net.bag.parameters())
    return result


def alone() -> dict:
    """Train on ranks without a process group."""
    net = model()
    return {"weights": train(net, 0)}


if __name__ == "__main__":
    from report import report

    report(globals()[sys.argv[1]](*sys.argv[2:]))
