"""Sums within a host use memory that the ranks share, or oneCCL on request."""

from __future__ import annotations

import pytest
from ranks import Ranks
from support.marks import repeat


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_sums_are_right_and_the_same_in_every_rank(ranks: Ranks, dtype: str) -> None:
    assert ranks.call("shared_memory") == [[True, False]] * ranks.size
    assert len(set(ranks.call("shm_sums", dtype))) == 1


def test_ranks_that_get_ahead_never_use_old_data(ranks: Ranks) -> None:
    assert ranks.call("race") == ["ok"] * ranks.size


def test_an_operation_may_have_tensors_of_several_types(ranks: Ranks) -> None:
    assert ranks.call("mixed_coalesced") == ["ok"] * ranks.size


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_reduced_in_float32_and_rounded_as_torch_does(ranks: Ranks, dtype: str) -> None:
    assert ranks.call("every_number_of_16_bits", dtype) == ["ok"] * ranks.size


def test_a_minimum_or_maximum_of_nan_is_nan(ranks: Ranks) -> None:
    assert ranks.call("extremes_of_nan") == ["ok"] * ranks.size


def test_averages_within_a_host_are_not_compressed(ranks: Ranks) -> None:
    assert ranks.call("compressed_averages") == ["ok"] * ranks.size
    assert ranks.call("exact_averages") == ["ok"] * ranks.size


@pytest.mark.slow
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("variables", [{"CCL_ALLREDUCE": "ring"}, repeat({"CCL_WORKER_COUNT": "2"})], ids=str)
def test_oneccl_sums_if_its_algorithm_or_workers_are_set(variables: dict[str, str]) -> None:
    pair = Ranks(2, **variables)
    try:
        assert pair.call("shared_memory") == [[False, False]] * 2
        assert len(set(pair.call("shm_sums", "float32"))) == 1
    finally:
        assert pair.close() == [0, 0]
