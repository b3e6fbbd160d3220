"""Gradient accumulation: one optimizer step, and one all-reduce of gradients, for several batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cpulaunch.errors import UsageError

_open_steps: list[Step] = []


class Step:
    """The batches of one optimizer step; ``len(step)`` is their number."""

    def __init__(self, batches: list[Any], models: tuple[nn.Module, ...]) -> None:
        self._batches, self._models = batches, models
        self._forward = 0  # number of batches yielded
        self._backward = 0  # number of batches with gradients

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Yield each batch; the backward pass of the last batch averages gradients over the ranks."""
        if self._forward:
            raise UsageError("a step of accumulate can be iterated over only once")
        for batch in self._batches:
            if self._forward != self._backward:
                raise UsageError(
                    f"step.backward(loss) was called {self._backward} times for {self._forward} batches: "
                    "call it once per batch, instead of loss.backward()"
                )
            self._forward += 1
            self._sync_gradients(self._forward == len(self))
            yield batch

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the current batch; gradients become the mean over the step's batches.

        ``loss`` is the mean loss of the batch, a scalar.
        """
        if self._backward >= self._forward:
            raise UsageError("step.backward(loss) was called twice for one batch: add up the losses first")
        (loss / len(self)).backward()  # type: ignore[no-untyped-call]
        self._backward += 1

    def _check_complete(self, optimizer: Optimizer) -> None:
        """Raise UsageError if ``optimizer`` trains this step's models, and batches are left."""
        if self._backward == len(self):
            return
        parameters = {parameter for model in self._models for parameter in model.parameters()}
        if any(p in parameters for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                f"the optimizer stepped after {self._backward} of {len(self)} batches of a step of "
                "accumulate: call optimizer.step() after the loop over all batches of the step"
            )

    def _close(self, *, abandoned: bool = False) -> None:
        """End the step.  Raises UsageError if batches are left, unless the user's loop ended early."""
        self._sync_gradients(True)
        if self._backward != len(self) and not abandoned:
            raise UsageError(
                f"{self._backward} of {len(self)} batches of a step were used, so its gradients are "
                "incomplete, and were not averaged over the ranks: use all batches of each step, and call "
                "step.backward(loss) for each"
            )

    def _sync_gradients(self, wanted: bool) -> None:
        for model in self._models:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = wanted


def accumulate(loader: Iterable[Any], batches: int, *models: nn.Module) -> Iterator[Step]:
    """Yield steps of ``batches`` batches of ``loader`` each; the last step may have fewer::

        for step in cpulaunch.accumulate(loader, 4, model):
            for x, y in step:
                with cpulaunch.autocast():
                    loss = loss_of(model(x), y)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    A step's gradients equal the gradients of one batch with all examples of the step.  ``models`` are the
    models that the loop trains.  Raises UsageError if gradients would be wrong: if a batch has no
    ``step.backward``, if the optimizer steps too early, or if a step is left unfinished.
    """
    if batches < 1:
        raise UsageError(f"accumulate: batches must be at least 1, got {batches}")
    if not models:
        raise UsageError("accumulate: no model was passed: accumulate(loader, batches, model)")
    source = iter(loader)
    while group := list(islice(source, batches)):
        step = Step(group, models)
        _open_steps.append(step)
        try:
            yield step
        except GeneratorExit:  # the user's loop ended early or raised an exception
            step._close(abandoned=True)
            return
        finally:
            _open_steps.remove(step)
        step._close()


def check_complete(optimizer: Optimizer) -> None:
    """Raise UsageError if an unfinished step has incomplete gradients for ``optimizer``."""
    for step in _open_steps:
        step._check_complete(optimizer)
