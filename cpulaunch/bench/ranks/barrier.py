"""A barrier of a bench's ranks, independent of the process groups that are measured."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

LIMIT = timedelta(minutes=10)


class Barrier:
    """A barrier on torch's TCPStore.  Waiting ranks sleep, so they don't slow down the other ranks."""

    def __init__(self) -> None:
        from torch._C._distributed_c10d import TCPStore  # torch.distributed hides it from mypy

        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = TCPStore(address, port, is_master=False, timeout=LIMIT)
        self._times = 0

    def exchange(self, value: object = None) -> list[Any]:
        """Wait for all ranks.  Return the ``value`` of each rank."""
        self._times += 1
        keys = [f"bench/{self._times}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value))
        self._store.wait(keys)
        return [json.loads(text) for text in self._store.multi_get(keys)]
