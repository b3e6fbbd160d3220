"""Scripts that know nothing of cpulaunch get the planned backend, precision and fused optimizers.

torch calls ``autoload`` at the end of its own import (entry point ``torch.backends``).  In ranks of a
cpulaunch job, and unless ``training.as_written`` is set, it has libraries changed: torch at once, the others
when a script has imported them.  With ``training.as_written``, it only tells of ranks that train separate
models.  Programs that don't import torch pay nothing for this.

Patching another library takes a module of its name in `change`, which holds its changes and ``TRIED``, the
versions of the library that it was tried with, and a line in MODULES.  A change is made with any version that
has the names that it needs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from cpulaunch import variables
from cpulaunch.ccl.installed import BINDINGS
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.settings import Table
from cpulaunch.runtime.change.base import apply_changes
from cpulaunch.runtime.change.import_hook import after_import
from cpulaunch.runtime.log import log_once
from cpulaunch.runtime.settings import TrainingSettings, training_settings


class Patched(NamedTuple):
    """A module of a library that is changed when a script has imported it, and where the changes stand."""

    library: str
    module: str
    changes: str = "CHANGES"


MODULES = (
    Patched("accelerate", "accelerate.state"),
    Patched("accelerate", "accelerate.accelerator", "OF_ACCELERATOR"),
    Patched("transformers", "transformers.training_args"),
    Patched("transformers", "transformers.trainer", "OF_TRAINER"),
    # Lightning is packed twice: as `lightning`, and as `pytorch_lightning` and `lightning_fabric`.
    Patched("lightning", "lightning.fabric.connector", "OF_FABRIC"),
    Patched("lightning", "lightning_fabric.connector", "OF_FABRIC"),
    Patched("lightning", "lightning.pytorch.trainer.connectors.accelerator_connector", "OF_TRAINER"),
    Patched("lightning", "pytorch_lightning.trainer.connectors.accelerator_connector", "OF_TRAINER"),
)


def autoload() -> None:
    """Called by torch at the end of its import."""
    if variables.JOB_ID not in os.environ:
        return
    import torch

    if not torch.distributed.is_available():
        return
    from cpulaunch.discovery.host.this_host import cpu_flags
    from cpulaunch.runtime.change.accelerate import tell_of_separate_copies
    from cpulaunch.runtime.change.own_groups import make_groups_of_one, tell_of_own_launcher, watch_groups
    from cpulaunch.runtime.change.precision import rank_precision
    from cpulaunch.runtime.change.torch import watch_first_step
    from cpulaunch.runtime.observe import ledger

    settings = training_settings()
    watch_groups(torch)
    ledger.keep(torch)
    after_import("torch.distributed.launcher.api", tell_of_own_launcher)
    if settings.as_written:
        watch_first_step(torch, settings)
        after_import("accelerate.state", partial(tell_of_separate_copies, settings))
        return
    if variables.INSTANCE in os.environ:
        make_groups_of_one(torch)
        return
    if settings.backend is None:
        return
    settings = replace(settings, precision=rank_precision(settings, cpu_flags()).precision)
    patch(Patched("torch", "torch"), settings, torch)
    for patched in MODULES:
        after_import(patched.module, partial(patch, patched, settings))
    after_import(BINDINGS, _keep_ccl)


def _keep_ccl(bindings: ModuleType) -> None:
    """``ccl`` stays what is planned, whatever a script imports."""
    from cpulaunch.ccl.register import take_name_back

    take_name_back()
    if rank_setting(Table.ccl.binding, os.environ) != "oneccl_bind_pt":
        log_once(
            f"this script imports {bindings.__name__}, but ccl stays cpulaunch's own "
            "(--ccl-binding oneccl_bind_pt takes Intel's)"
        )


def patch(patched: Patched, settings: TrainingSettings, module: ModuleType) -> None:
    """Change the module of a library as its patches say."""
    changes = getattr(import_module(f"cpulaunch.runtime.change.{patched.library}"), patched.changes)
    apply_changes(patched.library, changes, module, settings)
