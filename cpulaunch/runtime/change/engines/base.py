"""The interface of engines, which prepare a model and its optimizer for training."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Measured(NamedTuple):
    """A measured step time: ``ratio`` is the time with this engine divided by the time with native.

    ``cpu_flag`` is the CPU's best flag in ``HostFacts.cpu_flags``, and ``torch`` a series such as "2.8".
    """

    cpu_flag: str
    torch: str
    ratio: float
    source: str


class Engine(Protocol):
    """An engine.  A subclass must define ``name`` and ``apply``.

    ``needs_optimizer``: ``apply`` needs the model's optimizer, which must train no other model.
    ``broadcast_first``: rank 0's weights are broadcast before ``apply``, because the engine moves a part of
    them to tensors that DDP doesn't broadcast.  ``measured``: the step times that ``--engine auto`` compares;
    it considers only cpulaunch's own engines.
    """

    name: str
    needs_optimizer: bool = False
    broadcast_first: bool = False
    measured: tuple[Measured, ...] = ()

    def version(self) -> str | None:
        """Return the version of the engine's library; None if the library is not installed."""
        return ""

    def unavailable(self, torch_version: str, cpu_flags: Collection[str] | None) -> str | None:
        """Return why the engine can't be used with this torch and these CPU flags; None if it can.

        ``cpu_flags`` is None if they are unknown.  Must not import a library that may end the process.
        """
        return None

    def problem(self, model: nn.Module, optimizer: Optimizer | None) -> str | None:
        """Return why the engine can't train this model with this optimizer; None if it can."""
        return None

    def apply(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Change the optimizer in place, and return the model to train.

        ``optimizer`` is None if the model's optimizer is unknown, or also trains other models.
        """
        raise NotImplementedError
