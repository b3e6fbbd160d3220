"""The position of a training in its data, and how a data loader gets there again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from cpulaunch.runtime.checkpoint import randomness
from cpulaunch.runtime.log import log_once


class Position(NamedTuple):
    """A place in the data: ``batch`` batches of ``epoch`` (from 0) are used up.

    ``at_start`` are the random states before the epoch's first batch, ``now`` those at this place; None if
    they are not to be restored.  ``loader`` is the state of a loader that keeps its own.
    """

    epoch: int = 0
    batch: int = 0
    at_start: randomness.State | None = None
    now: randomness.State | None = None
    loader: Any = None


def is_stateful(loader: Any) -> bool:
    """Return whether a loader keeps its own position, as torchdata's StatefulDataLoader does."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def for_ranks(position: Position, before: int, ranks: int) -> Position:
    """Return the position for another number of ranks, with as many examples used, in whole batches.

    Rounds up, so that an epoch that is used up is not begun again.
    """
    return Position(position.epoch, -(-position.batch * before // ranks))


def set_epoch(loader: Any, epoch: int) -> None:
    """Pass the epoch to a loader, its samplers and its dataset, if they have ``set_epoch``."""
    places = (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")))
    for place in places:
        if callable(set_own := getattr(place, "set_epoch", None)):
            set_own(epoch)


def normalized(position: Position, loader: Any) -> Position:
    """Replace the end of an epoch by the start of the next one, if they are equivalent.

    They aren't if the loader has its own generators: an exhausted sampler may draw from them when it is asked
    for more.
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
    """Yield the epoch's batches after ``position``, with the random states restored to that place."""
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
    """Skip ``count`` batches; they are not read unless reading them draws random numbers."""
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
