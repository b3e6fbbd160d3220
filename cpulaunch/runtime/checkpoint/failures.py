"""Raises the failure of one rank on all ranks."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cpulaunch.errors import UsageError

T = TypeVar("T")


class Damaged(Exception):
    """A checkpoint can't be read; the message is the reason."""


def on_all_ranks(do: Callable[[], T], group: Any) -> T:
    """Call ``do`` on each rank of ``group``; return its result.

    If it fails on any rank, raises the first failed rank's error on all ranks: a UsageError unchanged, other
    exceptions as Damaged.
    """
    result, failure = None, None  # failure: (whether it is a UsageError, message, hint)
    try:
        result = do()
    except UsageError as error:
        failure = (True, str(error), error.hint)
    except CheckpointException as error:  # a subclass of BaseException; the same on all ranks
        if not all(isinstance(each, Exception) for each, _ in error.failures.values()):
            raise  # KeyboardInterrupt or SystemExit
        failure = (False, reason(error), None)
    except Exception as error:
        failure = (False, reason(error), None)
    failures: list[Any] = [failure] * dist.get_world_size(group)
    if len(failures) > 1:
        dist.all_gather_object(failures, failure, group=group)
    for rank, (is_usage, text, hint) in ((rank, each) for rank, each in enumerate(failures) if each):
        if is_usage:
            raise UsageError(text, hint=hint)
        raise Damaged(text if "(rank " in text else text + _place(rank))
    return result  # type: ignore[return-value]


def reason(error: BaseException) -> str:
    """Return the reason for an error in one line: if possible, an operating system's error on any rank."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    found = {rank: each[0] for rank, each in failures.items()} or {0: error}
    for rank, each in found.items():
        if isinstance(each, Damaged):
            return str(each)
        cause: BaseException | None = each
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno:
                return os.strerror(cause.errno) + _place(rank)
            cause = cause.__cause__ or cause.__context__
    rank, first = next(iter(found.items()))
    if isinstance(first, pickle.UnpicklingError):  # torch's message describes an argument of torch.load
        return f"its contents can't be read{_place(rank)}"
    sentence = str(first).partition("\n")[0].partition(". ")[0]
    return f"{type(first).__name__}: {sentence}{_place(rank)}"


def _place(rank: int) -> str:
    return f" (rank {rank})" if rank else ""
