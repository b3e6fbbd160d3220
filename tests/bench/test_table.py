"""The results of `cpulaunch bench`: the table, the JSON document, and the remarks about hosts."""

from __future__ import annotations

from typing import Any

import pytest

from cpulaunch.bench.table import Result, short

SIZE = 1 << 20


def place(host: int, local_rank: int, **changed: Any) -> dict[str, Any]:
    return {
        "host": f"node{host}",
        "local_rank": local_rank,
        "cpu": "Xeon",
        "threads": 2,
        "cores": [2 * local_rank, 2 * local_rank + 1],
        "host_cpus": 4,
        "interface": "eth0",
        "nominal": {"eth0": 10_000},
        **changed,
    }


def result(ccl: float = 500.0, copy: float = 100.0, alone: float = 1.2e9, **changed: Any) -> Result:
    """The result for two hosts with two ranks each, connected by a link of 10 Gbit/s."""
    turns = {"ccl": [ccl, ccl, ccl], "gloo": [900.0, 1000.0, 1100.0]}
    return Result.of(
        {
            "places": [place(host, rank, **changed) for host in (1, 2) for rank in (0, 1)],
            "hosts": [0, 0, 1, 1],
            "speeds": [[alone, 0.62e9, 30.0], [0.0, 0.62e9, 20.0]] * 2,
            "copies": {str(SIZE): copy},
            "turns": [{"operation": "all_reduce", "bytes": SIZE, "us": turns}],
        }
    )


def test_the_document_has_a_row_for_each_operation_and_size() -> None:
    document = result().to_json()
    (row,) = document["rows"]
    assert document["schema"] == 1
    assert document["cpu"] == "Xeon"
    assert [(host["name"], host["ranks"], host["cores"]) for host in document["hosts"]] == [
        ("node1", 2, 4),
        ("node2", 2, 4),
    ]
    assert (row["operation"], row["bytes"], row["ccl_us"], row["gloo_us"]) == ("all_reduce", SIZE, 500, 1000)
    assert row["gloo_over_ccl"] == [1.8, 2.0, 2.2]
    assert row["limit_us"] == pytest.approx(SIZE / 1.24e9 * 1e6 + 30)
    assert document["findings"] == []


def test_the_table_shows_the_distance_to_the_limit() -> None:
    lines = list(result().text())
    assert "link: 9.9 Gbit/s between hosts, 9.6 over one connection" in lines
    assert lines[-2].split()[:4] == ["all_reduce", "1M", "500", "1,000"]
    assert lines[-2].split()[-1] == "0.6"


@pytest.mark.parametrize(
    ("changed", "finding"),
    [
        (
            {"nominal": {"eth0": 1000, "ib0": 100_000}},
            "node1: the ranks use eth0 (1 Gbit/s), but ib0 has 100",
        ),
        ({"nominal": {"eth0": 40_000}}, "node2: eth0 has 40 Gbit/s nominally, but only 9.9 were measured"),
        ({"alone": 0.6e9}, "one connection carries 4.8 of 9.9 Gbit/s"),
        ({"host_cpus": 56}, "node1: the ranks use only 4 of 56 CPUs"),
        ({"copy": 5000.0}, "an all_reduce of 1M is limited by the ranks' memory"),
        ({"ccl": 2000.0}, "all_reduce of 1M is slower with ccl than with gloo"),
    ],
)
def test_slow_collectives_are_listed_with_the_cause(changed: dict[str, Any], finding: str) -> None:
    assert any(line.startswith(finding) for line in result(**changed).findings())


@pytest.mark.parametrize(
    ("size", "text"), [(4096, "4K"), (1 << 30, "1G"), (1000, "1000"), (3 << 19, "1536K")]
)
def test_sizes_are_printed_with_units(size: int, text: str) -> None:
    assert short(size) == text
