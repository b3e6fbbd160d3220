"""Installs a rank's observers, and the changes to torch and to the libraries that a script imports.

With these changes, a script gets the planned backend, precision and fused optimizers without importing
cpulaunch.  With ``training.as_written``, the only change is a hook that counts optimizer steps.

To change another library, add a module to `change` with a table of changes and ``TRIED``, the library
versions that it was tested with; then add a line to MODULES.  The version itself is never checked: a change
is made if the library has the names that it needs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from cpulaunch import variables
from cpulaunch.ccl.installed import BINDINGS
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.settings import Table
from cpulaunch.runtime.change.import_hook import after_import
from cpulaunch.runtime.hooks import Change, apply_changes
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings, training_settings


class Patched(NamedTuple):
    """A module of a library, and the dotted name in `runtime` of the table of its changes."""

    library: str
    module: str
    table: str

    @property
    def changes(self) -> tuple[Change, ...]:
        """The table, which is imported here."""
        module, _, name = self.table.rpartition(".")
        changes: tuple[Change, ...] = getattr(import_module(f"cpulaunch.runtime.{module}"), name)
        return changes


OF_STEPS = Patched("torch", "torch", "observe.ledger.CHANGES")
OF_GROUPS = Patched("torch", "torch", "observe.groups.CHANGES")
OF_TRACES = Patched("torch", "torch", "observe.tracing.CHANGES")
OF_OWN_GROUPS = Patched("torch", "torch", "observe.own_groups.CHANGES")
OF_LAUNCHER = Patched("torch", "torch.distributed.launcher.api", "observe.own_groups.OF_LAUNCHER")
OF_INSTANCES = Patched("torch", "torch", "change.instances.CHANGES")
OF_TORCH = Patched("torch", "torch", "change.torch.CHANGES")

MODULES = (
    Patched("accelerate", "accelerate.state", "change.accelerate.CHANGES"),
    Patched("accelerate", "accelerate.accelerator", "change.accelerate.OF_ACCELERATOR"),
    Patched("transformers", "transformers.training_args", "change.transformers.CHANGES"),
    Patched("transformers", "transformers.trainer", "change.transformers.OF_TRAINER"),
    Patched("transformers", "transformers.activations", "change.transformers.OF_ACTIVATIONS"),
    Patched("transformers", "transformers.loss.loss_utils", "change.transformers.OF_LOSSES"),
    # Lightning is distributed as `lightning`, and as `pytorch_lightning` with `lightning_fabric`.
    Patched("lightning", "lightning.fabric.connector", "change.lightning.OF_FABRIC"),
    Patched("lightning", "lightning_fabric.connector", "change.lightning.OF_FABRIC"),
    Patched(
        "lightning",
        "lightning.pytorch.trainer.connectors.accelerator_connector",
        "change.lightning.OF_TRAINER",
    ),
    Patched(
        "lightning",
        "pytorch_lightning.trainer.connectors.accelerator_connector",
        "change.lightning.OF_TRAINER",
    ),
    Patched("torch", "torch.distributed.fsdp._fully_shard._fsdp_param_group", "change.fsdp.CHANGES"),
)
"""Changes that are made when the script has imported the module."""

OBSERVED = (OF_STEPS, OF_GROUPS, OF_TRACES, OF_OWN_GROUPS, OF_LAUNCHER)
"""Changes that only observe.  `observe.tracing` makes those in OF_TRACES, during a trace."""

CHANGED = (OF_TORCH, OF_INSTANCES, *MODULES)


def install() -> None:
    """Install changes and observers in this process, which has imported torch."""
    import torch

    if not torch.distributed.is_available():
        return
    from cpulaunch.runtime.observe.ledger import STEPS, observers

    settings = training_settings()
    watching = observers(torch)
    if settings.as_written:
        apply_changes("torch", [(STEPS, watching)] if watching else [], torch)
        return
    changes: list[tuple[Change, Any]] = [(change, None) for change in OF_OWN_GROUPS.changes]
    if watching:
        changes += [(change, watching) for change in (*OF_STEPS.changes, *OF_GROUPS.changes)]
    if variables.INSTANCE in os.environ:
        changes += [(change, settings) for change in OF_INSTANCES.changes]
    elif settings.backend is not None:
        from cpulaunch.discovery.host.this_host import cpu_flags
        from cpulaunch.runtime.change.precision import rank_precision

        settings = replace(settings, precision=rank_precision(settings, cpu_flags()).precision)
        changes += [(change, settings) for change in OF_TORCH.changes]
    apply_changes("torch", changes, torch)
    after_import(OF_LAUNCHER.module, partial(patch, OF_LAUNCHER, settings))
    if variables.INSTANCE in os.environ or settings.backend is None:
        return
    for patched in MODULES:
        after_import(patched.module, partial(patch, patched, settings))
    after_import(BINDINGS, _keep_ccl)


def _keep_ccl(bindings: ModuleType) -> None:
    """Register the planned implementation of ``ccl`` again after Intel's bindings have replaced it."""
    from cpulaunch.ccl.register import take_name_back

    take_name_back()
    if rank_setting(Table.ccl.binding, os.environ) != "oneccl_bind_pt":
        log_once(
            f"this script imports {bindings.__name__}, but ccl stays cpulaunch's own "
            "(--ccl-binding oneccl_bind_pt selects Intel's)"
        )


def patch(patched: Patched, settings: TrainingSettings, module: ModuleType) -> None:
    """Make the changes of ``patched`` in its module."""
    apply_changes(patched.library, [(change, settings) for change in patched.changes], module)
