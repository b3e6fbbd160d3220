"""Gradients of several batches for one step of the optimizer, averaged over the ranks once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cpulaunch.errors import UsageError

_open: list[Step] = []
"""The step that is being accumulated, where one is."""


class Step:
    """The batches of one step of the optimizer; ``len(step)`` is how many they are."""

    def __init__(self, batches: list[Any], models: tuple[nn.Module, ...]) -> None:
        self._batches, self._models = batches, models
        self._parallel = [model for model in models if isinstance(model, DistributedDataParallel)]
        self._taken = 0
        self._done = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Each batch; gradients are averaged over the ranks in the last one's backward pass only."""
        if self._taken:
            raise UsageError("the batches of a step can be taken only once")
        for batch in self._batches:
            if self._taken != self._done:
                raise UsageError(
                    f"{self._taken} of a step's batches were taken, but step.backward(loss) was called "
                    f"{self._done} times: call it once for each batch, in place of loss.backward()"
                )
            self._taken += 1
            self._synchronise(self._taken == len(self))
            yield batch

    def backward(self, loss: torch.Tensor) -> None:
        """``loss.backward()`` for the batch at hand: the step's gradient is the mean over its batches.

        ``loss`` is that batch's mean loss, a scalar.
        """
        if self._done >= self._taken:
            raise UsageError("step.backward(loss) was called twice for one batch: add its losses up first")
        (loss / len(self)).backward()  # type: ignore[no-untyped-call]
        self._done += 1

    @property
    def complete(self) -> bool:
        return self._done == len(self)

    def concerns(self, optimizer: Optimizer) -> bool:
        own = {parameter for model in self._models for parameter in model.parameters()}
        return any(parameter in own for group in optimizer.param_groups for parameter in group["params"])

    def _synchronise(self, wanted: bool) -> None:
        for model in self._parallel:
            model.require_backward_grad_sync = wanted

    def _close(self) -> None:
        self._synchronise(True)
        if not self.complete:
            raise UsageError(
                f"{self._done} of {len(self)} batches of a step were used: the gradients of this step "
                "are not complete, and no rank has the others'. Take all batches of each step, and call "
                "step.backward(loss) for each"
            )


def accumulate(loader: Iterable[Any], batches: int, *models: nn.Module) -> Iterator[Step]:
    """Steps of ``batches`` batches of ``loader`` each (the last may have fewer), for ``models``::

        for step in cpulaunch.accumulate(loader, 4, model):
            for x, y in step:
                with cpulaunch.autocast():
                    loss = loss_of(model(x), y)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    The effect is that of one batch of the size of all of them.  UsageError where gradients would be wrong: a
    batch without its ``step.backward``, an optimizer that steps too early, a step that isn't finished.
    """
    if batches < 1:
        raise UsageError(f"accumulate: {batches} batches for a step; it takes at least 1")
    if not models:
        raise UsageError("accumulate(loader, batches, model): which model's gradients?")
    source = iter(loader)
    while taken := list(islice(source, batches)):
        step = Step(taken, models)
        _open.append(step)
        try:
            yield step
        except GeneratorExit:  # the user's loop ended early, or failed: that has its own message
            step._synchronise(True)
            return
        finally:
            _open.remove(step)
        step._close()


def check_complete(optimizer: Optimizer) -> None:
    """Raise UsageError where a step is under way whose gradients, for ``optimizer``, are not complete."""
    for step in _open:
        if not step.complete and step.concerns(optimizer):
            raise UsageError(
                f"the optimizer stepped after {step._done} of {len(step)} batches of a step of accumulate: "
                "step after the loop over its batches, which is not to be left early"
            )
