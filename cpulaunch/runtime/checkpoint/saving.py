"""Writes checkpoints in the background with torch.distributed.checkpoint."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from cpulaunch.runtime import reports
from cpulaunch.runtime.checkpoint import directory
from cpulaunch.runtime.checkpoint.directory import Facts
from cpulaunch.runtime.checkpoint.failures import reason
from cpulaunch.runtime.checkpoint.state import Tensors
from cpulaunch.runtime.log import log_once

NICE = 19
"""The niceness of the writing thread.  At 0, it would take time from the threads of the training step."""


class Saver:
    """Saves one checkpoint at a time to ``root``; ``group`` must be used for nothing else.

    Tensors are copied to buffers, which are reused in later saves, and a thread writes the buffers.
    """

    def __init__(self, root: Path, group: Any, rank: int, keep: int) -> None:
        self._root, self._group, self._rank, self._keep = root, group, rank, keep
        self._copies: Tensors = {}
        self._under_way: Future[Any] | None = None
        self._facts: Facts | None = None
        self._failed = False

    def start(self, tensors: Tensors, facts: Facts, *, urgent: bool = False) -> None:
        """Copy the tensors and start writing them.  Every rank must call this, after the end of other saves.

        ``urgent``: write at normal priority, because the training ends.
        """
        self._facts = facts
        if self._rank == 0:  # the other ranks write after the first collective of ``async_save``
            directory.remove_temporary(self._root)
        writer = _Writer(
            directory.partial(self._root, facts.step),
            self._copies,
            lambda: self._publish(facts),
            None if urgent else NICE,
        )
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # rank 0 saves replicated tensors
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            under_way: Any = async_save(
                tensors, storage_writer=writer, planner=planner, process_group=self._group
            )
        self._under_way = under_way

    def _publish(self, facts: Facts) -> None:
        directory.publish(self._root, facts, self._keep)
        reports.saved(facts.optimizer_steps)

    def wait(self) -> bool:
        """Wait for the save under way; return whether the last save succeeded, and log a failure.

        All ranks get the same result.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None or self._facts is None:
            return not self._failed
        error = under_way.exception()
        self._failed = error is not None
        if error is None:
            return True
        if self._rank == 0:
            directory.remove_temporary(self._root)
        last = directory.newest(self._root)
        log_once(
            f"the checkpoint of step {self._facts.step} was not saved: {reason(error)}; "
            + (f"{last} stays the last one" if last else "there is none before it")
        )
        return False

    def check(self) -> None:
        """Log the failure of a save that has ended."""
        if self._under_way is not None and self._under_way.done():
            self.wait()


class _Writer(FileSystemWriter):
    """Writes files, and calls ``publish`` on rank 0 when all ranks' files are on disk."""

    def __init__(
        self, path: Path, copies: Tensors, publish: Callable[[], None], niceness: int | None
    ) -> None:
        super().__init__(path, overwrite=True)
        self._copies, self._publish, self._niceness = copies, publish, niceness

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        if self._niceness is not None:
            # This is the writing thread's first call.  On Linux, each thread has a niceness of its own.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        super().set_up_storage_writer(*args, **kwargs)

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the tensors, which the training changes while the copies are written."""
        for name in self._copies.keys() - state_dict.keys():
            del self._copies[name]
        for name, tensor in state_dict.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                self._copies[name] = tensor.detach().clone()
            else:
                _local(copy).copy_(_local(tensor))
        return dict(self._copies)

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        self._publish()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
