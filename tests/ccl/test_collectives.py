"""Every operation has gloo's result.  hypothesis chooses operation, type, shape, layout and root."""

from __future__ import annotations

from collections.abc import Iterator

import programs_names as names
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from support.marks import repeat

from cpulaunch.ccl.installed import Built

# All examples use the same ranks.
examples = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)

shapes = st.one_of(
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.sampled_from([[1], [4097], [65_537], [0], [0, 3], [3, 1000], [300_000]]),
)
layouts = st.sampled_from(["plain", "plain", "strided", "transposed"])
seeds = st.integers(0, 10_000)


@pytest.mark.parametrize("kind", names.REDUCTIONS)
@examples
@given(reduced=st.sampled_from(names.REDUCED), shape=shapes, layout=layouts, root=st.integers(0, 2), seed=seeds,
       late=st.booleans())  # fmt: skip
def test_reductions_equal_gloos(ranks: Ranks, kind: str, reduced: tuple[str, str], shape: list[int], layout: str,
                                root: int, seed: int, late: bool) -> None:  # fmt: skip
    ranks.call("reduction", kind, *reduced, shape, layout, root, seed, late)


@pytest.mark.parametrize("kind", names.MOVEMENTS)
@examples
@given(dtype=st.sampled_from(names.MOVED), shape=shapes,
       layout=layouts, root=st.integers(0, 2), seed=seeds, late=st.booleans())  # fmt: skip
def test_movements_deliver_the_senders_values(ranks: Ranks, kind: str, dtype: str, shape: list[int], layout: str, root: int,
                                         seed: int, late: bool) -> None:  # fmt: skip
    ranks.call("movement", kind, dtype, shape, layout, root, seed, late)


# --- through oneCCL, which is used only on request


@pytest.fixture(scope="module")
def oneccl(built: Built) -> Iterator[Ranks]:
    # With lazy initialization, making a gloo group doesn't wait for all ranks, so a rank may be late.
    ranks = Ranks(3, CPULAUNCH_RANK_CCL_TRANSPORT="oneccl", TORCH_GLOO_LAZY_INIT="1")
    yield ranks
    assert ranks.close() == [0, 0, 0]


@pytest.mark.slow
def test_oneccls_scaled_sum(oneccl: Ranks) -> None:
    assert oneccl.call("scaled_sum") == [1.5] * 3


few = settings(examples, max_examples=8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [repeat(kind) for kind in names.REDUCTIONS])
@few
@given(reduced=st.sampled_from(names.REDUCED), shape=shapes, layout=layouts, root=st.integers(0, 2), seed=seeds,
       late=st.booleans())  # fmt: skip
def test_oneccls_reductions_equal_gloos(oneccl: Ranks, kind: str, reduced: tuple[str, str], shape: list[int],
                                        layout: str, root: int, seed: int, late: bool) -> None:  # fmt: skip
    oneccl.call("reduction", kind, *reduced, shape, layout, root, seed, late)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [repeat(kind) for kind in names.MOVEMENTS])
@few
@given(dtype=st.sampled_from(names.MOVED), shape=shapes, layout=layouts, root=st.integers(0, 2), seed=seeds,
       late=st.booleans())  # fmt: skip
def test_oneccls_movements_deliver_the_senders_values(oneccl: Ranks, kind: str, dtype: str, shape: list[int], layout: str,
                                                 root: int, seed: int, late: bool) -> None:  # fmt: skip
    if kind in ("send_recv", "recv_any"):
        assume(dtype not in names.NOT_FOR_GLOO and 0 not in shape)
    oneccl.call("movement", kind, dtype, shape, layout, root, seed, late)


@pytest.mark.slow
@pytest.mark.parametrize("late_to", ["call", "connect"])
def test_oneccl_serves_one_group_while_a_rank_of_another_is_late(oneccl: Ranks, late_to: str) -> None:
    assert oneccl.call("others_go_on", late_to, 2000) == [[2, 3], [2, 3], [1, 3]]


@pytest.mark.slow
def test_oneccls_groups_suggest_an_alternative_to_bitwise_reduce_scatter(oneccl: Ranks) -> None:
    with pytest.raises(AssertionError, match="oneCCL has no bitwise reductions; use all_reduce"):
        oneccl.call("reduction", "reduce_scatter", "BAND", "int32", [5], "plain", 0, 0, False)
