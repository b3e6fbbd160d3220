"""torch: the backend of process groups, their store's port, DDP models' precision, the step of optimizers."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from contextlib import ExitStack, suppress
from typing import Any

from cpulaunch import variables
from cpulaunch.discovery.host import master_port
from cpulaunch.errors import UsageError
from cpulaunch.runtime.change.base import (
    Change,
    announce,
    announce_with_step,
    precision_owners,
    step_changes,
)
from cpulaunch.runtime.change.engines import native
from cpulaunch.runtime.change.groups import replace_backend
from cpulaunch.runtime.change.precision import chosen, current_precision
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings

TRIED = ("2.8.0", "2.13.0")

_data_parallel: weakref.WeakSet[Any] = weakref.WeakSet()  # DDP models that have run


def _autocast_ddp(torch: Any, settings: TrainingSettings) -> None:
    """A DistributedDataParallel of the script's own runs its forward pass in bf16, if that is the precision.

    That is, where the script is in no autocast context, and nobody else sees to the model's precision.  A
    model that has run within the script's own autocast is left alone: a script may train in it, and
    evaluate outside.
    """
    ddp, tree_map = torch.nn.parallel.DistributedDataParallel, torch.utils._pytree.tree_map
    original = ddp.forward

    def as_fp32(value: Any) -> Any:
        is_bf16 = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
        return value.float() if is_bf16 else value

    left_alone: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        _data_parallel.add(self)
        if _in_autocast(torch):
            left_alone.add(self)
        if current_precision(settings) != "bf16":
            return original(self, *inputs, **kwargs)
        if self in left_alone or any(owns(self) for owns in precision_owners) or not _is_fp32(torch, self):
            return original(self, *inputs, **kwargs)
        tell = announce_with_step if torch.is_grad_enabled() else announce
        tell("DDP in bf16, where the script has no autocast")
        with torch.autocast("cpu", torch.bfloat16):
            outputs = original(self, *inputs, **kwargs)
        return tree_map(as_fp32, outputs)

    ddp.forward = forward


def _compress_gradients(torch: Any, settings: TrainingSettings) -> None:
    """A DistributedDataParallel of the script's own, over all ranks, sends its gradients in bf16."""
    if settings.compress_gradients != "bf16":
        return
    ddp = torch.nn.parallel.DistributedDataParallel
    original = ddp.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from cpulaunch.runtime import distributed
        from cpulaunch.runtime.change import comm_hooks

        over_all = self.process_group is torch.distributed.group.WORLD
        if not over_all or isinstance(self, distributed.DataParallel):
            return
        if hook := comm_hooks.hook_for(self.module, compress=True):
            comm_hooks.average_by(self, hook)
            if hook in comm_hooks.COMPRESSING:
                announce_with_step("gradients of DDP sent in bf16")

    ddp.__init__ = __init__


def _in_autocast(torch: Any) -> bool:
    """Whether the caller is in an autocast context; ``enabled=False`` is the script's choice, too."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return bool(nesting)


def _is_fp32(torch: Any, model: Any) -> bool:
    return all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())


def _watch_steps(torch: Any, settings: TrainingSettings) -> None:
    """At its first step, an optimizer takes its fused step, where torch has one and the script no choice.

    All that is changed in training is told then, and whether each rank trains by itself.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer in seen:
            return
        seen.add(optimizer)
        if native.fuse(optimizer):
            native.keep_layouts(optimizer)
            announce_with_step(f"{type(optimizer).__name__} takes its fused step")
        announce(*step_changes())
        _tell_of_separate_copies(torch, settings)
        if current_precision(settings) == "bf16" and not _has_precision(optimizer):
            log_once(
                "this script's precision is its own: the planned bf16 is for DDP models, accelerate, "
                "transformers and Lightning, and for what runs in `with cpulaunch.autocast():`"
            )

    register_optimizer_step_pre_hook(before_step)


def watch_first_step(torch: Any, settings: TrainingSettings) -> None:
    """For scripts as they are written: only tell if each rank trains by itself."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: _tell_of_separate_copies(torch, settings)
    )


def _tell_of_separate_copies(torch: Any, settings: TrainingSettings) -> None:
    """A warning where there are several ranks, and no process group; with ``--strict`` UsageError."""
    ranks, on_host = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks == "1" or torch.distributed.is_initialized():
        return
    remedy = (
        "one model takes DistributedDataParallel, cpulaunch.prepare, "
        f"Accelerator(cpu=True) or Lightning's Trainer(strategy='ddp', devices={on_host})"
    )
    if settings.strict:
        raise UsageError(
            f"{_calling_line()}: the first optimizer step, and there is no process group: each of the "
            f"{ranks} ranks would train a model of its own",
            hint=remedy,
        )
    log_once(
        f"warning: there is no process group: the ranks train by themselves, so they train {ranks} separate "
        f"models, and write the same files; {remedy}"
    )


def _calling_line() -> str:
    """``file:line`` of the innermost call that is neither torch's nor cpulaunch's."""
    frame = sys._getframe()
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "cpulaunch") and frame.f_back:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _has_precision(optimizer: Any) -> bool:
    """Whether anything sees to the precision of what ``optimizer`` trains: DDP, a library, or cpulaunch."""
    return (
        bool(_data_parallel)
        or chosen.cache_info().currsize > 0
        or any(o(optimizer) for o in precision_owners)
    )


def _listen_on_kept_port(torch: Any, settings: TrainingSettings) -> None:
    """The store that is to listen on the port that the job keeps gets a socket there to listen on."""
    kept = os.environ.get(variables.KEPT_PORT)
    if kept is None:
        return
    store = torch.distributed.TCPStore
    original = store.__init__

    @functools.wraps(original)
    def init(
        self: Any,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *args: Any,  # timeout, wait_for_workers, multi_tenant, master_listen_fd, use_libuv
        **kwargs: Any,
    ) -> None:
        with ExitStack() as stack:
            if is_master and str(port) == kept and len(args) < 4 and "master_listen_fd" not in kwargs:
                with suppress(OSError):  # torch tries, and says why it can't listen
                    kwargs["master_listen_fd"] = stack.enter_context(master_port.offered(port, host_name))
            original(self, host_name, port, world_size, is_master, *args, **kwargs)

    store.__init__ = init


CHANGES = (
    Change(
        (
            "distributed.group",
            "distributed.get_rank",
            "distributed.Backend",
            "distributed.distributed_c10d.init_process_group",
            "distributed.distributed_c10d.new_group",
            "distributed.distributed_c10d.get_backend",
        ),
        "process groups have the backend that the script names",
        replace_backend,
    ),
    Change(
        ("distributed.TCPStore.__init__",),
        "a store can't listen on a MASTER_PORT that is kept from other users",
        _listen_on_kept_port,
    ),
    Change(
        (
            "nn.parallel.DistributedDataParallel.forward",
            "utils._pytree.tree_map",
            "autocast_increment_nesting",
            "autocast_decrement_nesting",
        ),
        "DDP models are in the precision that the script names",
        _autocast_ddp,
    ),
    Change(
        (
            "distributed.group",
            "nn.parallel.DistributedDataParallel.__init__",
            "nn.parallel.DistributedDataParallel._check_comm_hook",
            "nn.parallel.DistributedDataParallel.register_comm_hook",
        ),
        "gradients of DDP models are sent as they are",
        _compress_gradients,
    ),
    Change(
        ("optim.optimizer.register_optimizer_step_pre_hook",),
        "optimizers take the step that the script names",
        _watch_steps,
    ),
)
