"""torch: changes backends, the port of the store, the precision of DDP models, and optimizers' steps."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any

from cpulaunch import variables
from cpulaunch.discovery.host import master_port
from cpulaunch.runtime.change.base import announce, announce_with_step, precision_owners, with_step
from cpulaunch.runtime.change.engines import native
from cpulaunch.runtime.change.groups import replace_backend
from cpulaunch.runtime.change.kernels import use_kernels
from cpulaunch.runtime.change.precision import choice, current_precision
from cpulaunch.runtime.hooks import Change
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings

TRIED = ("2.8.0", "2.13.0")

listens_on_kept_port = False
"""Whether torch's store uses the job's socket; otherwise, `agent.program.master_port` closes it."""

_first_store: list[Any] = []
"""The store of the first default group, kept alive by `_keep_store`; empty before it is created."""

_ddp_models: weakref.WeakSet[Any] = weakref.WeakSet()  # DDP models that have run


def _autocast_ddp(torch: Any, settings: TrainingSettings) -> None:
    """Run the forward pass of DistributedDataParallel in bf16 if the precision is bf16.

    A model is left alone if it isn't in fp32, if a library sets its precision, or if it has ever run in an
    autocast context of the script: a script may train in the context, and evaluate outside of it.
    """
    ddp, tree_map = torch.nn.parallel.DistributedDataParallel, torch.utils._pytree.tree_map
    original = ddp.forward

    def as_fp32(value: Any) -> Any:
        is_bf16 = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
        return value.float() if is_bf16 else value

    with_autocast: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        _ddp_models.add(self)
        if _in_autocast(torch):
            with_autocast.add(self)
        if current_precision(settings) != "bf16":
            return original(self, *inputs, **kwargs)
        if self in with_autocast or any(owns(self) for owns in precision_owners) or not _is_fp32(torch, self):
            return original(self, *inputs, **kwargs)
        log = announce_with_step if torch.is_grad_enabled() else announce
        log("DDP in bf16, where the script has no autocast")
        with torch.autocast("cpu", torch.bfloat16):
            outputs = original(self, *inputs, **kwargs)
        return tree_map(as_fp32, outputs)

    ddp.forward = forward


def _compress_gradients(torch: Any, settings: TrainingSettings) -> None:
    """Send gradients in bf16 if DistributedDataParallel spans all ranks, and if the settings ask for it."""
    if settings.compress_gradients != "bf16":
        return
    ddp = torch.nn.parallel.DistributedDataParallel
    original, register = ddp.__init__, ddp.register_comm_hook

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from cpulaunch.runtime import distributed
        from cpulaunch.runtime.change import comm_hooks

        all_ranks = self.process_group is torch.distributed.group.WORLD
        if not all_ranks or isinstance(self, distributed.DataParallel):  # `prepare` registers its own hook
            return
        if hook := comm_hooks.hook_for(self.module, compress=True):
            comm_hooks.average_by(self, hook)
            if hook in comm_hooks.COMPRESSING:
                announce_with_step("gradients of DDP sent in bf16")

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Any) -> None:
        from cpulaunch.runtime.change import comm_hooks

        if not comm_hooks.replace(self, state, hook):
            register(self, state, hook)

    ddp.__init__, ddp.register_comm_hook = __init__, register_comm_hook


def _in_autocast(torch: Any) -> bool:
    """Return whether the caller is in an autocast context, with ``enabled`` True or False."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return bool(nesting)


def _is_fp32(torch: Any, model: Any) -> bool:
    return all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())


def _watch_steps(torch: Any, settings: TrainingSettings) -> None:
    """Enable an optimizer's fused implementation before its first step, and announce all changes.

    It is not enabled if the script has chosen an implementation.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    known: weakref.WeakSet[Any] = weakref.WeakSet()

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer in known:
            return
        known.add(optimizer)
        if native.fuse(optimizer):
            announce_with_step(f"{type(optimizer).__name__} uses its fused implementation")
        announce(*with_step)
        if current_precision(settings) == "bf16" and not _has_precision(optimizer):
            log_once(
                "this script's precision is its own: the planned bf16 is used by DDP models, accelerate, "
                "transformers and Lightning, and in `with cpulaunch.autocast():`"
            )

    register_optimizer_step_pre_hook(before_step)


def _has_precision(optimizer: Any) -> bool:
    """Return whether DDP, a library or cpulaunch sets the precision of the models of ``optimizer``."""
    return (
        bool(_ddp_models) or choice.cache_info().currsize > 0 or any(o(optimizer) for o in precision_owners)
    )


def _listen_on_kept_port(torch: Any, settings: TrainingSettings) -> None:
    """Pass the job's listening socket to a store that listens on the job's reserved port."""
    global listens_on_kept_port
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
        if is_master and str(port) == kept and not kwargs.get("multi_tenant"):
            _first_store.clear()  # the script creates its own store at this port
        with ExitStack() as stack:
            if is_master and str(port) == kept and len(args) < 4 and "master_listen_fd" not in kwargs:
                with suppress(OSError):  # torch then listens itself, and reports the error
                    kwargs["master_listen_fd"] = stack.enter_context(master_port.offered(port, host_name))
            try:
                original(self, host_name, port, world_size, is_master, *args, **kwargs)
            except Exception as e:
                if is_master and "EADDRINUSE" in str(e) and str(port) != kept:
                    log_once(
                        f"port {port}, which the script has chosen, is in use: if the script sets no "
                        "MASTER_PORT, the port reserved for this job is used",
                        every_rank=True,
                    )
                raise

    store.__init__ = init
    listens_on_kept_port = True


def _keep_store(torch: Any, settings: TrainingSettings) -> None:
    """Keep the job's store until the process ends, and give each later default group a prefix for its keys.

    Otherwise, the store would end when rank 0 destroys the default group, and ranks that create the next
    group before then would connect to the old store.  The store still ends if the script creates a store of
    its own at this port.
    """
    c10d = torch.distributed.distributed_c10d
    original, numbers = c10d.rendezvous, count()

    @functools.wraps(original)
    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
        _warn_of_rank_0(rank, world_size)
        results = original(url, rank, world_size, **kwargs)
        store, *rank_and_size = next(results)
        if url.startswith("env://"):
            if number := next(numbers):
                store = torch.distributed.PrefixStore(f"again-{number}", store)
            elif listens_on_kept_port:
                _first_store.append(store)
        yield store, *rank_and_size
        yield from results

    c10d.rendezvous = rendezvous


def _warn_of_rank_0(rank: int, world_size: int) -> None:
    """Warn if the script passes ``rank=0`` in another rank of the job, as it may do this in all ranks."""
    ours = os.environ.get("RANK", "0")
    if rank == 0 != int(ours) and str(world_size) == os.environ.get("WORLD_SIZE"):
        log_once(
            f"this is rank {ours} of the job, but the script passes rank=0 and world_size={world_size} to "
            "init_process_group, which hangs if all ranks do so; without them, it uses the job's values",
            every_rank=True,
        )


def _leave_ccl_unwrapped(torch: Any, settings: TrainingSettings) -> None:
    """Don't wrap ccl groups in torch's debugging wrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL).

    The wrapper calls the group only after all ranks have called it, so ccl could not report late ranks.
    """
    c10d = torch.distributed.distributed_c10d
    wrap = c10d._create_process_group_wrapper

    @functools.wraps(wrap)
    def wrapper(wrapped_pg: Any, *args: Any, **kwargs: Any) -> Any:
        if type(wrapped_pg).__name__ == "ProcessGroupCCL":
            return wrapped_pg
        return wrap(wrapped_pg, *args, **kwargs)

    c10d._create_process_group_wrapper = wrapper


CHANGES = (
    Change(
        ("distributed.distributed_c10d._create_process_group_wrapper",),
        (),
        "leaves groups of ccl as they are with `TORCH_DISTRIBUTED_DEBUG=DETAIL`, as ccl checks calls itself",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL makes ranks wait outside of ccl, which then names no late rank",
        _leave_ccl_unwrapped,
    ),
    Change(
        tuple(
            f"distributed.distributed_c10d.{name}"
            for name in ("init_process_group", "new_group", "get_backend")
        ),
        ("distributed.group", "distributed.get_rank", "distributed.Backend"),
        "makes groups of the planned backend, which report the name that the script knows",
        "process groups have the backend that the script names",
        replace_backend,
    ),
    Change(
        ("distributed.TCPStore.__init__",),
        (),
        "listens on the `MASTER_PORT` that is kept from other users",
        "MASTER_PORT is not kept from other users until the store listens there",
        _listen_on_kept_port,
    ),
    Change(
        ("distributed.distributed_c10d.rendezvous",),
        ("distributed.PrefixStore",),
        "keeps the job's store, so that the default group can be destroyed and made again",
        "ranks that make the default group again may meet at the store of the destroyed one, which ends",
        _keep_store,
    ),
    Change(
        ("nn.parallel.DistributedDataParallel.forward",),
        ("utils._pytree.tree_map", "autocast_increment_nesting", "autocast_decrement_nesting"),
        "computes in the planned precision, if the script has no autocast",
        "DDP models are in the precision that the script names",
        _autocast_ddp,
    ),
    Change(
        tuple(f"nn.parallel.DistributedDataParallel.{name}" for name in ("__init__", "register_comm_hook")),
        ("distributed.group", "nn.parallel.DistributedDataParallel._check_comm_hook"),
        "sends gradients in bf16, if `--compress-gradients` asks for it",
        "gradients of DDP models are sent as they are",
        _compress_gradients,
    ),
    Change(
        ("nn.functional.dropout",),
        (
            "_C._functorch.maybe_current_level",
            "compiler.is_exporting",
            "jit.is_scripting",
            "optim.optimizer.register_optimizer_step_pre_hook",
        ),
        "computes dropout, and attention with dropout, by compiled kernels (`--engine native`)",
        "training steps use torch alone, without cpulaunch's kernels",
        use_kernels,
    ),
    Change(
        (),
        ("optim.optimizer.register_optimizer_step_pre_hook",),
        "enables optimizers' fused steps, and reports all changes",
        "optimizers use the step that the script names",
        _watch_steps,
    ),
)
