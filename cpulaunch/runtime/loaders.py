"""Data loaders of which each rank takes its share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from cpulaunch.errors import UsageError
from cpulaunch.runtime import distributed
from cpulaunch.runtime.say import say


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler that shuffles anew in each epoch untold (``set_epoch`` still works)."""

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.epoch += 1
        return indices


def share(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader like ``loader`` of this rank's share of the data; batches keep their size.

    Where the data can't be divided evenly, the last ranks get some examples twice, so that all ranks take
    the same number of steps.  Every rank has to call this: the seed of the shuffling is rank 0's.
    Raises UsageError for a loader whose own sampler can't be divided.
    """
    if distributed.world_size() == 1 or isinstance(loader.sampler, DistributedSampler):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        say(f"{type(loader.dataset).__name__} is an IterableDataset: giving each rank its part is up to it")
        return loader
    plain = type(loader.sampler) in (SequentialSampler, RandomSampler) and type(loader.batch_sampler) in (
        BatchSampler,
        type(None),
    )
    if not plain or getattr(loader.sampler, "replacement", False):
        odd = (
            loader.sampler
            if type(loader.batch_sampler) in (BatchSampler, type(None))
            else loader.batch_sampler
        )
        raise UsageError(
            f"prepare can't divide a data loader with a {type(odd).__name__} of its own among ranks: "
            "let that sampler give each rank its part (cpulaunch.rank(), cpulaunch.world_size()), and leave "
            "the loader out of prepare"
        )
    sampler = EpochSampler(
        loader.dataset,
        num_replicas=distributed.world_size(),
        rank=distributed.rank(),
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=distributed.broadcast_number(torch.initial_seed() % 2**31),
        drop_last=loader.drop_last,
    )
    return type(loader)(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
