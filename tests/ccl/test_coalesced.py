"""Coalesced operations have gloo's results, and hooks and torch's profiler get information on operations."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks


def test_coalesced_collectives_have_gloos_results(ranks: Ranks) -> None:
    assert ranks.call("coalesced_reductions") == ["ok"] * ranks.size


def test_coalesced_operations_of_several_kinds_have_a_single_work(ranks: Ranks) -> None:
    for error in ranks.call("coalesced_kinds"):
        assert "coalesces nothing" in error


@pytest.mark.parametrize("length", [10, 1_000_000])
def test_a_batch_of_messages_has_a_single_work(ranks: Ranks, length: int) -> None:
    assert ranks.call("messages_in_a_batch", length) == [[1, 2 * (ranks.size - 1)]] * ranks.size


def test_a_group_can_be_used_after_a_wrong_call_in_a_batch(two: Ranks) -> None:
    for error, kept in two.call("a_call_that_fails_within_a_batch"):
        assert error.startswith("ccl all_to_all: expected a list of")
        assert kept == 0


def test_a_completion_hook_is_called_for_each_operation(two: Ranks) -> None:
    for second, *learnt in two.call("completion_hook"):
        assert second == ["a second hook"]
        assert learnt == [
            ["OpType.ALLREDUCE", 0, True, True],
            ["OpType.BROADCAST", 1, True, True],
            ["OpType.ALLREDUCE", 2, True, True],
        ]


def test_the_profiler_shows_sizes_and_groups(ranks: Ranks, tmp_path: Path) -> None:
    for rank, events in enumerate(ranks.call("profiled", str(tmp_path))):
        size = ranks.size
        facts = [
            [event[key] for key in ("Collective name", "In msg nelems", "Out msg nelems", "dtype")]
            for event in events
        ]
        sent, received = 2 * size - 1, size if rank == 0 else 2 * size
        expected = [
            ["allreduce", 1000, 1000, "BFloat16"],
            ["_allgather_base", 600, 600 * size, "Float"],
            ["_reduce_scatter_base", 600 * size, 600, "Float"],
            ["broadcast", 600, 600, "Float"],
            ["all_to_allv", sent, received, "Long"],
            ["barrier", 0, 0, "Byte"],
            *([["send", 5, 5, "Float"]] if rank == 0 else [["recv", 5, 5, "Float"]] if rank == 1 else []),
        ]
        assert facts == expected
        assert {event["Group size"] for event in events} == {size}
        assert {event["Process Group Name"] for event in events} == {"0"}
        assert {event["Process Group Description"] for event in events} == {"default_pg"}
        assert {event["Process Group Ranks"] for event in events} == {str(list(range(size)))}
        assert events[0]["Rank"] == rank
        assert events[3]["Rank"] == 1  # the root
