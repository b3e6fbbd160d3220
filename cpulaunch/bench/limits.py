"""The least time that a collective can take, by the speed of memory and links.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
"""All operations, in the order of the table.  ``send_recv`` is between rank 0 and the last rank."""


class Limits(NamedTuple):
    """The measured limits of the hosts.

    ``copy_us``: bytes → microseconds that the slowest rank takes to copy them, while all ranks copy.
    ``link``: bytes per second that the slowest host sends to another over the connections of all its ranks,
    and ``one_connection``: over one of them.  Both are 0 on a single host.  ``latency_us``: half a round trip
    between hosts.
    """

    copy_us: Mapping[int, float]
    link: float = 0.0
    one_connection: float = 0.0
    latency_us: float = 0.0


def limit_us(operation: str, size: int, hosts: Sequence[int], limits: Limits) -> float:
    """Return the least microseconds for ``operation`` on a whole tensor of ``size`` bytes.

    ``hosts`` holds the number of each rank's host.  A rank has to read its input and to write its output,
    and the busiest host has to send what others need from it; the longer of the two counts.
    """
    memory = limits.copy_us[size] * memory_share(operation, len(hosts))
    wire = least_wire(operation, hosts)
    if not wire:
        return memory
    return max(memory, wire * size / limits.link * 1e6 + limits.latency_us)


def memory_share(operation: str, ranks: int) -> float:
    """Return the bytes that a rank has to read and write, divided by those of a copy of the whole tensor.

    A rank of an all_gather reads the whole tensor, as it has to fetch the parts of all ranks.
    """
    return (1 + 1 / ranks) / 2 if operation == "reduce_scatter" else 1.0


def least_wire(operation: str, hosts: Sequence[object]) -> float:
    """Return the least that the busiest host sends for ``operation``, in sizes of the whole tensor.

    ``hosts`` are the ranks' hosts.  The whole tensor is the tensor that a rank sums, gathers, scatters or
    sends to all; for ``send_recv``, it is the message.
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
    """Return the rank to which rank 0 sends: the last one, or that of a name such as ``send_recv:1``."""
    rank = operation.partition(":")[2]
    return ranks - 1 if rank in ("", "last") else int(rank)
