"""What an engine is: the way in which a model's training step is done in bf16.

An engine is one object in one module, found by its name (see ``runtime.change.engines.load``).  The rest of
the program asks it through the protocol ``Engine``, and knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Measured(NamedTuple):
    """A step with this engine ÷ a step with native, on one CPU and one torch: below 1, this engine is faster.

    ``cpu_flag`` is the best of ``HostFacts.cpu_flags``; ``torch`` is a series: "2.8".
    """

    cpu_flag: str
    torch: str
    ratio: float
    source: str


class Engine(Protocol):
    """An engine.  Those of other packages may inherit from this; ``name`` and ``apply`` have no default.

    ``needs_optimizer``: ``apply`` takes a model only together with its one optimizer, which trains nothing
    else.  ``broadcast_first``: ranks take rank 0's weights before ``apply``, as the engine keeps a part of
    them where DDP, which broadcasts parameters and buffers, does not find it.  ``measured`` is what
    ``--engine auto`` goes by, and read of the engines of this package alone: others are taken by name.
    """

    name: str
    needs_optimizer: bool = False
    broadcast_first: bool = False
    measured: tuple[Measured, ...] = ()

    def version(self) -> str | None:
        """The version of the library that it uses; None where that is not installed."""
        return ""

    def unavailable(self, torch_version: str, cpu_flags: Collection[str] | None) -> str | None:
        """Why it can't be used with this torch on a CPU with these flags for bf16; None where it can.

        ``cpu_flags`` is None where they are not known.  It must not import what may end the process.
        """
        return None

    def problem(self, model: nn.Module, optimizer: Optimizer | None) -> str | None:
        """Why it can't take this model with this optimizer; None where it can."""
        return None

    def apply(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Make both ready and return the model to train; the optimizer is changed in place.

        ``optimizer`` is None where the model's optimizer is not known, or trains other models, too.
        """
        raise NotImplementedError
