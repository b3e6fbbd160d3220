"""The least possible time of a collective."""

from __future__ import annotations

import pytest

from cpulaunch.bench.limits import OPERATIONS, Limits, least_wire, limit_us

ONE_HOST, TWO_BY_TWO = (0, 0), (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("operation", "hosts", "sent"),
    [
        ("all_reduce", TWO_BY_TWO, 1.0),
        ("all_reduce", (0, 1, 2, 3), 1.5),
        ("all_gather", TWO_BY_TWO, 0.5),
        ("reduce_scatter", (0, 1, 2, 3), 0.75),
        ("broadcast", TWO_BY_TWO, 1.0),
        ("all_to_all", TWO_BY_TWO, 1.0),
        ("all_to_all", (0, 0, 0, 1), 0.75),
        ("send_recv", TWO_BY_TWO, 1.0),
        ("send_recv:1", TWO_BY_TWO, 0.0),
        *((operation, ONE_HOST, 0.0) for operation in OPERATIONS),
    ],
)
def test_the_busiest_host_sends_the_data_that_the_others_need(
    operation: str, hosts: tuple[int, ...], sent: float
) -> None:
    assert least_wire(operation, hosts) == sent


def test_the_slower_of_memory_and_network_is_the_limit() -> None:
    limits = Limits({1000: 10.0}, link=1e9, one_connection=1e9, latency_us=5.0)
    assert limit_us("all_reduce", 1000, ONE_HOST, limits) == 10.0
    assert limit_us("reduce_scatter", 1000, ONE_HOST, limits) == 7.5
    assert limit_us("all_reduce", 1000, TWO_BY_TWO, limits) == 10.0  # 1 us on the link, and 5 of latency
    slow = limits._replace(link=1e7)
    assert limit_us("all_reduce", 1000, TWO_BY_TWO, slow) == pytest.approx(105.0)
