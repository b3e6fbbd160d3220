"""torch's features that use a process group work with ccl: DDP, hooks, FSDP2, checkpoints, subgroups."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks
from support.marks import repeat

pytestmark = pytest.mark.slow


@pytest.fixture(params=[repeat("two"), "three", repeat("four")])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Two ranks suffice, because these features hardly depend on the number of ranks."""
    return request.getfixturevalue(request.param)


def test_ddp_trains_as_with_gloo(ranks: Ranks) -> None:
    for ours, gloos in ranks.call("train_ddp"):
        # With two ranks, the order of summation doesn't matter; with more, the last bits may differ.
        assert ours == (gloos if ranks.size == 2 else pytest.approx(gloos, rel=1e-5))


@pytest.mark.parametrize(
    "hook",
    [repeat("allreduce_hook"), repeat("fp16_compress_hook"), repeat("bf16_compress_hook"), "powerSGD_hook"],
)
def test_ddp_comm_hooks(ranks: Ranks, hook: str) -> None:
    for ours, gloos in ranks.call("train_ddp", hook=hook):
        assert ours == pytest.approx(gloos, rel=1e-2)


def test_ddp_averages_buffers_and_finds_unused_parameters(ranks: Ranks) -> None:
    for ours, gloos in ranks.call("train_ddp", unused=True):
        assert ours == pytest.approx(gloos, rel=1e-5)


def test_fsdp2_trains_as_with_gloo_and_as_in_a_single_process(ranks: Ranks) -> None:
    for shared, ours, gloos, alone in ranks.call("train_fsdp2"):
        assert shared == ours
        assert ours == pytest.approx(gloos, rel=1e-5)
        assert ours == pytest.approx(alone, rel=1e-4)


def test_distributed_checkpoint_round_trip(ranks: Ranks, tmp_path: Path) -> None:
    assert all(ranks.call("checkpoint", str(tmp_path)))


def test_object_collectives(ranks: Ranks) -> None:
    for rank, (gathered, broadcast, scattered) in enumerate(ranks.call("objects")):
        assert gathered == [{"rank": r, "text": "x" * r * 100} for r in range(ranks.size)]
        assert broadcast == ["from 1", 1]
        assert scattered == [rank * 10]


def test_subgroups_coexist_and_end_in_any_order(three: Ranks) -> None:
    assert three.call("subgroups") == [[3, 4, None], [3, None, 5], [None, 4, 5]]


def test_a_subgroup_may_be_made_by_its_members_only(three: Ranks) -> None:
    assert three.call("pairs") == ["ok"] * 3


@pytest.mark.repeats
def test_groups_with_the_same_name_do_not_mix(four: Ranks) -> None:
    for _ in range(3):
        assert four.call("own_pair") == [3, 3, 7, 7]


def test_bitwise_reductions_and_monitored_barrier(ranks: Ranks) -> None:
    everyone = (1 << ranks.size) - 1
    assert ranks.call("bitwise") == [[everyone, 0, everyone]] * ranks.size


def test_scaled_sum(ranks: Ranks) -> None:
    total = ranks.size * (ranks.size + 1) / 2
    assert ranks.call("scaled_sum") == [total / 4] * ranks.size


def test_averages_of_unsigned_numbers(ranks: Ranks) -> None:
    assert ranks.call("unsigned_averages") == [[[ranks.size + 1] * 3] * 3] * ranks.size


def test_asynchronous_collectives_overlap_and_complete_out_of_order(ranks: Ranks) -> None:
    assert ranks.call("many_in_flight", limit=90) == ["ok"] * ranks.size


def test_futures_run_callbacks_that_communicate(ranks: Ranks) -> None:
    assert ranks.call("chained") == [ranks.size * ranks.size] * ranks.size


def test_an_asynchronous_call_returns_before_its_peer_joins(ranks: Ranks) -> None:
    assert ranks.call("release_the_peer") == ["ok"] * ranks.size


def test_errors_of_usage_leave_the_group_usable(ranks: Ranks) -> None:
    for messages in ranks.call("misuse"):
        assert messages[0].startswith("ccl broadcast: invalid root rank: 9")
        assert "times the input's" in messages[1]
        assert "does not divide equally across group size" in messages[2]
        assert "complex" in messages[3]
        assert messages[4].startswith("ccl all_gather: expected a list of")
        assert "ccl reduce_scatter: invalid tensor type at index 1" in messages[5]
        assert "ccl all_reduce_coalesced: only supports dense tensors" in messages[6]
        assert messages[7] == "ccl: tensors of type Int have no scaled sum"
        assert messages[8].startswith("ccl: elements of this tensor share memory")
        assert messages[9] == "ccl all_to_all_single: this rank sends itself 2 elements and receives 1"


def test_waiting_releases_the_gil(two: Ranks) -> None:
    assert two.call("wait_while_a_thread_runs") == ["ok", "ok"]


@pytest.mark.repeats
def test_memory_does_not_grow(two: Ranks) -> None:
    for growth in two.call("repeat", 4_000, 200, limit=240):
        assert growth["allreduce"] < 0.05  # MB: 12 bytes for each
        assert growth["groups"] < 2.0


@pytest.mark.repeats
def test_more_elements_than_an_int_can_count(two: Ranks) -> None:
    assert two.call("large", 2**31 + 24, limit=300) == ["ok", "ok"]
