"""Tensors that lie in memory which the ranks of a host share are reduced where they are."""

from __future__ import annotations

import os
import re

import pytest
from ranks import Ranks


def test_sums_have_the_same_bits_wherever_the_tensors_lie(ranks: Ranks) -> None:
    assert ranks.call("shared_sums") == ["ok"] * ranks.size


def test_nothing_is_left_of_them(ranks: Ranks) -> None:
    for before, after in ranks.call("shared_and_freed", 30):
        assert after == before


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1),
    reason="the kernel makes huge pages of shared memory on demand from 6.1 on",
)
def test_large_ones_are_mapped_by_huge_pages(two: Ranks) -> None:
    """Both ranks' tensors, in both ranks; of the other's tensor a rank maps the half that it sums."""
    for size, huge in two.call("mapped_by_huge_pages", 16):
        assert size == 32
        assert huge >= 16 + 6


def test_a_forked_child_takes_nothing_from_the_others(two: Ranks) -> None:
    assert two.call("shared_and_forked") == ["ok"] * 2


def test_a_group_says_whether_it_is_of_use(two: Ranks) -> None:
    assert two.call("shares_memory") == [[True, False]] * 2


def test_what_cannot_be_shared(two: Ranks) -> None:
    sparse, meta, empty = two.call("not_shared")[0]
    assert sparse == "ccl share_memory: only supports dense tensors"
    assert "CPU" in meta
    assert empty == "True"


@pytest.mark.slow
def test_a_hook_of_the_scripts_own_takes_the_place_of_ours(two: Ranks) -> None:
    for calls, gradient, error in two.call("prepared_with_own_hook"):
        assert (calls, gradient) == (["called"], 7.0)
        assert "can only be called once" in error


@pytest.mark.slow
def test_the_bucket_of_a_prepared_model_is_shared(two: Ranks) -> None:
    """DDP makes another one after its first step."""
    for held in two.call("prepared_buckets"):
        assert held == [0, 1, 1, 1, 1]
