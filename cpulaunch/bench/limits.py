"""Computes the minimum time of a collective from the speed of memory and links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
"""The operations, in the order of the table.  ``send_recv``: between rank 0 and the last rank."""


class Limits(NamedTuple):
    """The measured limits of the hosts.

    ``copy_us``: number of bytes → microseconds in which the slowest rank copies them, while all ranks copy.
    ``link``: bytes per second that the slowest host sends to another host, over one connection per rank.
    ``one_connection``: bytes per second over a single connection.  ``latency_us``: half of a round trip
    between hosts.  On a single host, all but ``copy_us`` are 0.
    """

    copy_us: Mapping[int, float]
    link: float = 0.0
    one_connection: float = 0.0
    latency_us: float = 0.0


def limit_us(operation: str, size: int, hosts: Sequence[int], limits: Limits) -> float:
    """Return the minimum time of ``operation`` on a whole tensor of ``size`` bytes, in microseconds.

    ``hosts``: the number of each rank's host.  Each rank reads its input and writes its output, and the
    busiest host sends data to other hosts; the limit is the longer of these two times.
    """
    memory = limits.copy_us[size] * memory_share(operation, len(hosts))
    wire = least_wire(operation, hosts)
    if not wire:
        return memory
    return max(memory, wire * size / limits.link * 1e6 + limits.latency_us)


def memory_share(operation: str, ranks: int) -> float:
    """Return the bytes that a rank reads and writes, as a fraction of a copy of the whole tensor.

    In an all_gather, each rank reads the whole tensor, because it fetches the parts of all ranks.
    """
    return (1 + 1 / ranks) / 2 if operation == "reduce_scatter" else 1.0


def least_wire(operation: str, hosts: Sequence[object]) -> float:
    """Return the minimum data that the busiest host sends, as a multiple of the whole tensor.

    ``hosts``: the host of each rank.  The whole tensor is the input of all_reduce, reduce_scatter, broadcast
    and all_to_all, the output of all_gather, and the message of send_recv.
    """
    count = len(set(hosts))
    if operation == "all_to_all":
        return max(ranks * (1 - ranks / len(hosts)) for ranks in Counter(hosts).values())
    if operation.startswith("send_recv"):
        return float(hosts[0] != hosts[other_end(operation, len(hosts))])
    if operation.startswith("all_reduce"):
        return 2 * (count - 1) / count
    return float(count > 1) if operation == "broadcast" else (count - 1) / count


def other_end(operation: str, ranks: int) -> int:
    """Return the rank that rank 0 sends to: the last rank, or rank 1 for the name ``send_recv:1``."""
    rank = operation.partition(":")[2]
    return ranks - 1 if rank in ("", "last") else int(rank)
