"""Tensors in memory that the ranks of a host share are reduced in place."""

from __future__ import annotations

import os
import re

import pytest
from ranks import Ranks


def test_sums_have_the_same_bits_in_any_kind_of_memory(ranks: Ranks) -> None:
    assert ranks.call("shared_sums") == ["ok"] * ranks.size


def test_shared_tensors_leave_no_resources(ranks: Ranks) -> None:
    for before, after in ranks.call("shared_and_freed", 30):
        assert after == before


@pytest.mark.repeats  # the kernel may refuse while other processes fill the page cache
@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1),
    reason="the kernel makes huge pages of shared memory on demand from 6.1 on",
)
def test_large_tensors_are_in_huge_pages(two: Ranks) -> None:
    """Each rank maps its own tensor and half of the other rank's tensor, which it sums."""
    mapped = two.call("mapped_by_huge_pages", 16)
    if any(huge < 16 + 6 for _, huge in mapped) and any(refusals := two.call("refusal_of_huge_pages", 16)):
        pytest.skip(f"the kernel gives nobody huge pages now: {refusals}")
    for size, huge in mapped:
        assert size == 32
        assert huge >= 16 + 6


def test_a_forked_child_does_not_affect_shared_tensors(two: Ranks) -> None:
    assert two.call("shared_and_forked") == ["ok"] * 2


def test_a_group_reports_whether_sharing_is_useful(two: Ranks) -> None:
    assert two.call("shares_memory") == [[True, False]] * 2


def test_sharing_unsupported_tensors_is_an_error(two: Ranks) -> None:
    sparse, meta, empty = two.call("not_shared")[0]
    assert sparse == "ccl share_memory: only supports dense tensors"
    assert "CPU" in meta
    assert empty == "True"


def test_collectives_use_allocated_tensors_in_place(ranks: Ranks) -> None:
    assert ranks.call("gathered_and_scattered_in_place") == ["ok"] * ranks.size


def test_sums_of_allocated_tensors_have_the_same_bits(ranks: Ranks) -> None:
    assert ranks.call("scattered_with_the_same_bits") == ["ok"] * ranks.size


def test_allocated_memory_is_reused_and_freed(two: Ranks) -> None:
    for before, kept, after, used in two.call("allocated_and_freed", 20):
        assert kept == [before[0] + 2, before[1] + 1]  # each rank maps its own block and the other's
        assert after == before
        assert used == [1]


def test_unsupported_tensors_are_not_allocated_in_shared_memory(two: Ranks) -> None:
    alone, meta, negative, *small = two.call("not_allocated")[0]
    assert alone == "False"
    assert meta.startswith("ccl allocate_tensor: only dense tensors on the CPU")
    assert negative == "ccl allocate_tensor: a tensor can't have -1 elements"
    assert small == ["(3,)", "torch.float64"]


@pytest.mark.slow
def test_a_scripts_own_communication_hook_replaces_cpulaunchs(two: Ranks) -> None:
    for calls, gradient, error in two.call("prepared_with_own_hook"):
        assert (calls, gradient) == (["called"], 7.0)
        assert "can only be called once" in error


@pytest.mark.slow
def test_the_bucket_of_a_prepared_model_is_shared(two: Ranks) -> None:
    """DDP makes a new bucket after its first step."""
    for held in two.call("prepared_buckets"):
        assert held == [0, 1, 1, 1, 1]
