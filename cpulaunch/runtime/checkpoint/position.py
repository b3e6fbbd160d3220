"""Where a training is in its data, and how a data loader gets there again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from cpulaunch.runtime.checkpoint import randomness
from cpulaunch.runtime.log import log_once


class Position(NamedTuple):
    """``batch`` batches of ``epoch`` (from 0) are used up.

    ``at_start`` are the random states before the epoch's first batch, ``now`` those at this place; None where
    they are not to be restored.  ``loader`` is the state of a loader that keeps one itself.
    """

    epoch: int = 0
    batch: int = 0
    at_start: randomness.State | None = None
    now: randomness.State | None = None
    loader: Any = None


def is_stateful(loader: Any) -> bool:
    """Whether a loader keeps its position itself, as torchdata's StatefulDataLoader does."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def for_ranks(position: Position, before: int, ranks: int) -> Position:
    """The position for another number of ranks: as many examples of the epoch are used, in whole batches.

    Rounded up: an epoch of which all was used is not begun once more.
    """
    return Position(position.epoch, -(-position.batch * before // ranks))


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader, its samplers and its dataset which epoch begins, as far as they want to know."""
    places = (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")))
    for place in places:
        if callable(set_own := getattr(place, "set_epoch", None)):
            set_own(epoch)


def normalized(position: Position, loader: Any) -> Position:
    """The same place; the start of the next epoch rather than the end of one, where that is all the same.

    A sampler may draw from a generator of its loader when it is asked for more than it has.
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
    """The batches of an epoch after ``position``; random states are then as they were there."""
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
    """Leave out ``count`` batches; where nobody draws random numbers for them, they are not read."""
    if type(batches) is _SingleProcessDataLoaderIter and not isinstance(loader.dataset, IterableDataset):
        skip: Any = batches._next_index
    else:
        skip = batches.__next__
    if count and getattr(loader, "persistent_workers", False):
        log_once(
            "the workers of a data loader with persistent_workers draw other random numbers than without "
            "the restart"
        )
    for _ in range(count):
        try:
            skip()
        except StopIteration:
            return
