"""The interface of engines, which run a model's training step in bf16.

An engine is one object in one module, found by its name (see ``runtime.change.engines.load``).  The rest of
the program uses it through the protocol ``Engine`` only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Measured(NamedTuple):
    """Step time with this engine ÷ with native, on one CPU and one torch: below 1, this engine is faster.

    ``cpu_flag`` is the best of ``HostFacts.cpu_flags``; ``torch`` is a series, such as "2.8".
    """

    cpu_flag: str
    torch: str
    ratio: float
    source: str


class Engine(Protocol):
    """An engine.  Those of other packages may inherit from this; ``name`` and ``apply`` have no default.

    ``needs_optimizer``: ``apply`` needs a model's one optimizer, which must train nothing else.
    ``broadcast_first``: ranks take rank 0's weights before ``apply``, because the engine keeps part of them
    where DDP, which broadcasts parameters and buffers, doesn't find it.  ``measured`` guides
    ``--engine auto``, which reads it of this package's engines only; others are chosen by name.
    """

    name: str
    needs_optimizer: bool = False
    broadcast_first: bool = False
    measured: tuple[Measured, ...] = ()

    def version(self) -> str | None:
        """Return the version of the engine's library; None if the library is not installed."""
        return ""

    def unavailable(self, torch_version: str, cpu_flags: Collection[str] | None) -> str | None:
        """Return why the engine can't be used with this torch on a CPU with these bf16 flags; None if it can.

        ``cpu_flags`` is None if they are unknown.  Must not import anything that may end the process.
        """
        return None

    def problem(self, model: nn.Module, optimizer: Optimizer | None) -> str | None:
        """Return why the engine can't train this model with this optimizer; None if it can."""
        return None

    def apply(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Prepare model and optimizer, and return the model to train; the optimizer is changed in place.

        ``optimizer`` is None if the model's optimizer is not known, or also trains other models.
        """
        raise NotImplementedError
