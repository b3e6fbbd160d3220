"""What collectives send from host to host: counted in a rank, and the least that is possible."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

QUIET = 0.05
"""Seconds for what is still on its way, such as acknowledgements."""


class Meeting:
    """Where all ranks wait for each other by torch's store instead of the group that is measured.

    Those that wait sleep in a socket, and take no time from ranks that work.  Needs the default group.
    """

    def __init__(self) -> None:
        from torch import distributed
        from torch._C._distributed_c10d import TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = TCPStore(address, port, is_master=False)
        self._rank, self._size = distributed.get_rank(), distributed.get_world_size()
        self._times = 0

    def exchange(self, value: object = "") -> list[str]:
        """Wait for all ranks; what each of them brings, by rank."""
        self._times += 1
        keys = [f"meeting/{self._times}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], str(value))
        self._store.wait(keys)
        return [text.decode() for text in self._store.multi_get(keys)]

    def count(self, work: Callable[[], object]) -> int:
        """The bytes that this rank's host sends to others while all ranks do their ``work``."""
        self.exchange()
        time.sleep(QUIET)
        before = sent()
        self.exchange()  # nobody works before all have looked
        work()
        self.exchange()
        time.sleep(QUIET)
        after = sent()
        self.exchange()  # nobody goes on to other work before
        return after - before


def sent() -> int:
    """The bytes that the interface of this rank's host has sent so far, with headers."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def least_wire(operation: str, hosts: Sequence[str]) -> float:
    """The least that the busiest host sends for ``operation``, in sizes of the whole tensor.

    ``hosts`` are those of the ranks.  The whole tensor is what a rank sums, gathers, scatters or sends to
    all; of a round trip (``send_recv:last``) it is each of the two messages.
    """
    count = len(set(hosts))
    if operation == "all_to_all":
        return max(ranks * (1 - ranks / len(hosts)) for ranks in Counter(hosts).values())
    if operation.startswith("send_recv"):
        return float(hosts[0] != hosts[other_end(operation, len(hosts))])
    if operation.startswith("all_reduce"):
        return 2 * (count - 1) / count
    return float(count > 1) if operation == "broadcast" else (count - 1) / count


def other_end(operation: str, size: int) -> int:
    """The rank to which rank 0 sends in ``send_recv:1`` or ``send_recv:last``."""
    rank = operation.partition(":")[2]
    return size - 1 if rank == "last" else int(rank)
