"""FSDP2: allocates communication buffers in memory that the ranks of a host share.

Collectives then need no copy of the buffers.  A script can change this by calling
``set_allocate_memory_from_process_group_for_comm`` of the model.
"""

from __future__ import annotations

import functools
from typing import Any

from cpulaunch.runtime.hooks import Change
from cpulaunch.runtime.settings import TrainingSettings


def _allocate_by_group(module: Any, settings: TrainingSettings) -> None:
    """Make FSDP2 allocate memory from the process group; ccl's groups within a host support this."""
    parameters = module.FSDPParamGroup
    original = parameters.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not isinstance(self.mesh_info, module.FSDPMeshInfo):
            return  # parameters are replicated, so there are no such buffers
        if hasattr(self, "set_allocate_memory_from_process_group"):
            self.set_allocate_memory_from_process_group(True)
        else:  # torch before 2.9
            self.allocate_memory_from_process_group = True

    parameters.__init__ = __init__


CHANGES = (
    Change(
        ("FSDPParamGroup.__init__",),
        ("FSDPMeshInfo",),
        "FSDP2's buffers for collectives lie in memory that the ranks of a host share",
        "FSDP2's collectives copy their data through shared memory",
        _allocate_by_group,
    ),
)
