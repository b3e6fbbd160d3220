"""Gradient accumulation: one optimizer step for several batches, with one averaging over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cpulaunch.errors import UsageError

_steps_under_way: list[Step] = []


class Step:
    """The batches of one optimizer step; ``len(step)`` is their number."""

    def __init__(self, batches: list[Any], models: tuple[nn.Module, ...]) -> None:
        self._batches, self._models = batches, models
        self._forward = 0  # batches handed out
        self._backward = 0  # batches with gradients

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Yield each batch; gradients are averaged over the ranks in the last batch's backward pass only."""
        if self._forward:
            raise UsageError("the batches of a step can be taken only once")
        for batch in self._batches:
            if self._forward != self._backward:
                raise UsageError(
                    f"{self._forward} of a step's batches were taken, but step.backward(loss) was called "
                    f"{self._backward} times: call it once for each batch, in place of loss.backward()"
                )
            self._forward += 1
            self._sync_gradients(self._forward == len(self))
            yield batch

    def backward(self, loss: torch.Tensor) -> None:
        """Run ``loss.backward()`` for the current batch; the step's gradient is the mean over its batches.

        ``loss`` is the mean loss of that batch, a scalar.
        """
        if self._backward >= self._forward:
            raise UsageError("step.backward(loss) was called twice for one batch: add its losses up first")
        (loss / len(self)).backward()  # type: ignore[no-untyped-call]
        self._backward += 1

    def _check_complete(self, optimizer: Optimizer) -> None:
        """Raise UsageError if ``optimizer`` trains this step's models and gradients are missing."""
        if self._backward == len(self):
            return
        parameters = {parameter for model in self._models for parameter in model.parameters()}
        if any(p in parameters for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                f"the optimizer stepped after {self._backward} of {len(self)} batches of a step of "
                "accumulate: step after the loop over its batches, and complete that loop"
            )

    def _close(self, *, abandoned: bool = False) -> None:
        """End the step; raise UsageError if gradients are missing, unless it was ``abandoned``."""
        self._sync_gradients(True)
        if self._backward != len(self) and not abandoned:
            raise UsageError(
                f"{self._backward} of {len(self)} batches of a step were used: the gradients of this step "
                "are not complete, and were not averaged over the ranks. Take all batches of each step, and "
                "call step.backward(loss) for each"
            )

    def _sync_gradients(self, wanted: bool) -> None:
        for model in self._models:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = wanted


def accumulate(loader: Iterable[Any], batches: int, *models: nn.Module) -> Iterator[Step]:
    """Yield steps of ``batches`` batches of ``loader`` each, for ``models``; the last may have fewer::

        for step in cpulaunch.accumulate(loader, 4, model):
            for x, y in step:
                with cpulaunch.autocast():
                    loss = loss_of(model(x), y)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    The result is the same as with one batch that holds all of a step's examples.  Raises UsageError if
    gradients would be wrong: a batch without ``step.backward``, an optimizer step that comes too early, or an
    unfinished step.
    """
    if batches < 1:
        raise UsageError(f"accumulate: {batches} batches for a step; it takes at least 1")
    if not models:
        raise UsageError("accumulate(loader, batches, model): which model's gradients?")
    source = iter(loader)
    while taken := list(islice(source, batches)):
        step = Step(taken, models)
        _steps_under_way.append(step)
        try:
            yield step
        except GeneratorExit:  # the user's loop ended early or failed, which has its own message
            step._close(abandoned=True)
            return
        finally:
            _steps_under_way.remove(step)
        step._close()


def check_complete(optimizer: Optimizer) -> None:
    """Raise UsageError if a step is under way whose gradients for ``optimizer`` are incomplete."""
    for step in _steps_under_way:
        step._check_complete(optimizer)
