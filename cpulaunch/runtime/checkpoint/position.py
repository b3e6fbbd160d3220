"""The position of a training in its data, and how a data loader returns to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from cpulaunch.runtime.checkpoint import randomness
from cpulaunch.runtime.log import log_once


class Position(NamedTuple):
    """The position after ``batch`` batches of ``epoch`` (from 0).

    ``at_start``: the random states before the epoch's first batch.  ``now``: the random states at the
    position.  Both are None if they must not be restored.  ``loader``: the state of a loader that has a
    ``state_dict``, or None.
    """

    epoch: int = 0
    batch: int = 0
    at_start: randomness.State | None = None
    now: randomness.State | None = None
    loader: Any = None


def is_stateful(loader: Any) -> bool:
    """Return whether the object saves its own state, as torchdata's StatefulDataLoader does."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def for_ranks(position: Position, before: int, ranks: int) -> Position:
    """Return the position of ``ranks`` ranks after the examples that ``before`` ranks have used.

    Rounds up to whole batches, so that the end of an epoch stays its end.
    """
    return Position(position.epoch, -(-position.batch * before // ranks))


def set_epoch(loader: Any, epoch: int) -> None:
    """Pass the epoch to a loader, its samplers and its dataset, if they have ``set_epoch``."""
    parts = (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")))
    for part in parts:
        if callable(function := getattr(part, "set_epoch", None)):
            function(epoch)


def normalized(position: Position, loader: Any) -> Position:
    """Replace a position at an epoch's end by the start of the next epoch, if they are equivalent.

    They aren't if the loader has its own generators, because a sampler may draw from them when it ends.
    """
    try:
        length = len(loader)
    except TypeError:
        return position
    own_generators = position.now and position.now["generators"]
    if is_stateful(loader) or own_generators or not 0 < length <= position.batch:
        return position
    return Position(position.epoch + 1, 0, None, position.now)


def batches_from(loader: Any, position: Position) -> Iterator[Any]:
    """Restore the random states at ``position``, and return an iterator over the epoch's batches after it."""
    if position.at_start:
        randomness.restore(position.at_start, loader)
    if position.loader is not None:
        loader.load_state_dict(position.loader)
    batches: Iterator[Any] = iter(loader)
    if position.loader is None:
        _skip(loader, batches, position.batch)
    if position.now:
        randomness.restore(position.now, loader)
    return batches


def _skip(loader: Any, batches: Iterator[Any], count: int) -> None:
    """Skip ``count`` batches.  Their data are read only by workers, or from an IterableDataset."""
    if type(batches) is _SingleProcessDataLoaderIter and not isinstance(loader.dataset, IterableDataset):
        skip: Any = batches._next_index
    else:
        skip = batches.__next__
    if count and getattr(loader, "persistent_workers", False):
        log_once(
            "after a restart, the workers of a data loader with persistent_workers draw other random numbers"
        )
    for _ in range(count):
        try:
            skip()
        except StopIteration:
            return
