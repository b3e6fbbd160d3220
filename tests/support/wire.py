"""The bytes that collectives send between hosts, counted in a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from cpulaunch.bench.ranks.barrier import Barrier

QUIET = 0.05
"""Seconds for packets in transit, such as acknowledgements."""


class Meeting(Barrier):
    """A barrier of all ranks that also counts the bytes sent by a host."""

    def count(self, work: Callable[[], object]) -> int:
        """Return the bytes that this rank's host sends to others while all ranks run ``work``."""
        self.exchange()
        time.sleep(QUIET)
        before = sent()
        self.exchange()  # no rank works before all have read the counters
        work()
        self.exchange()
        time.sleep(QUIET)
        after = sent()
        self.exchange()  # no rank continues before all have read the counters
        return after - before


def sent() -> int:
    """Return the bytes that the interface of this rank's host has sent so far, including headers."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
