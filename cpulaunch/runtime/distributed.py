"""Ranks, their process group, and data-parallel models."""

from __future__ import annotations

import os
import re
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import get_backend_config
from torch.nn.parallel import DistributedDataParallel

from cpulaunch import variables
from cpulaunch.ccl import installed
from cpulaunch.errors import UsageError
from cpulaunch.runtime.change import comm_hooks
from cpulaunch.runtime.join import environment_to_join, other_launchers_rank
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import training_settings

T = TypeVar("T")

_UNFINISHED = "Expected to have finished reduction in the prior iteration"


def init(backend: str | None = None, **options: Any) -> None:
    """Create the default process group; do nothing if it exists.

    ``backend`` defaults to the planned backend; outside of cpulaunch, to ccl if it is built, else to gloo.
    ``options`` are passed to ``torch.distributed.init_process_group``.  Ranks that srun or mpiexec started
    without cpulaunch form one group.  A process that was not started as a rank gets a group of one, so the
    same script also runs alone.

    Raises HostError if ccl is requested and not built, UsageError if another launcher doesn't give the
    address of rank 0, and torch's errors if the rendezvous fails.
    """
    if dist.is_initialized():
        return
    if "WORLD_SIZE" not in os.environ and not {"rank", "world_size", "store", "init_method"} & set(options):
        started = other_launchers_rank()
        if started is None:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            return
        os.environ.update(environment_to_join(started))
        log_once(
            f"{started.launcher.title} started {started.size} ranks: they train one model "
            f"(with {variables.SEPARATE}=1, each rank trains its own)"
        )
    fastest = "ccl" if installed.state().problem is None else "gloo"
    dist.init_process_group(backend or training_settings().backend or fastest, **options)


def backend() -> str | None:
    """Return the backend of the default process group, such as ``"ccl"``; None without a group.

    ``torch.distributed.get_backend()`` returns the name that the script requested.
    """
    if not dist.is_initialized():
        return None
    by_device = dict(pair.split(":") for pair in get_backend_config().split(","))
    return by_device.get("cpu")


def rank() -> int:
    """Return this process's rank; 0 if it is the only process."""
    if dist.is_initialized():
        return dist.get_rank()
    started = other_launchers_rank()
    return started.rank if started else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks; 1 if this is the only process."""
    if dist.is_initialized():
        return dist.get_world_size()
    started = other_launchers_rank()
    return started.size if started else int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return whether this is rank 0."""
    return rank() == 0


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without DDP and torch.compile, so that names in its state dict have no prefix."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model)  # the model that torch.compile wrapped


class DataParallel(DistributedDataParallel):
    """torch's DistributedDataParallel, with an error that names the parameters without a gradient."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if _UNFINISHED not in str(error):
                raise
            raise UsageError(self._unused_message(str(error))) from error

    def register_comm_hook(self, state: object, hook: Any) -> None:
        if not comm_hooks.replace(self, state, hook):
            super().register_comm_hook(state, hook)

    def _unused_message(self, message: str) -> str:
        names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        indices = [int(word) for word in found[1].split()] if found else []
        unused = [names[index] for index in indices if index < len(names)]
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        return (
            f"{len(unused) or 'some'} parameters got no gradient in the last step on rank {rank()}"
            f"{': ' + shown if shown else ''}. Remove them from the model, freeze them with "
            "requires_grad_(False), or call prepare(…, find_unused_parameters=True), which searches the "
            "graph in each step"
        )


def data_parallel(
    model: nn.Module,
    *,
    find_unused_parameters: bool,
    static_graph: bool,
    bucket_mb: int | None,
    compress: bool,
) -> DataParallel:
    """Wrap ``model`` in DDP.  ``bucket_mb`` is in MB (2²⁰ bytes), None for torch's default."""
    wrapped = DataParallel(
        model,
        bucket_cap_mb=bucket_mb,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,  # no copy of gradients into buckets
        static_graph=static_graph,
    )
    if hook := comm_hooks.hook_for(model, compress=compress):
        comm_hooks.average_by(wrapped, hook)
    return wrapped


def broadcast(model: nn.Module) -> None:
    """Overwrite all ranks' parameters and buffers with rank 0's."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            # oneCCL broadcasts only contiguous memory, which weights in channels_last are not.
            contiguous = tensor.detach().contiguous()
            dist.broadcast(contiguous, 0)
            if not tensor.is_contiguous():
                tensor.copy_(contiguous)


def broadcast_object(value: T, group: Any = None) -> T:
    """Return rank 0's value, which must be picklable, on every rank of a process group."""
    values = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]
