"""Functional collectives, DTensors and tensor parallelism under torch.compile."""

from __future__ import annotations

import pytest
from ranks import Ranks
from support.marks import repeat

pytestmark = pytest.mark.slow

LIMIT = 240.0  # seconds: the compiler of C++ is slow


@pytest.fixture(params=["two", repeat("three")])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("compiler", [repeat(None), repeat("aot_eager"), "inductor"])
def test_functional_collectives_have_gloos_results(ranks: Ranks, compiler: str | None) -> None:
    assert ranks.call("functional_collectives", compiler, limit=LIMIT) == ["ok"] * ranks.size


@pytest.mark.parametrize("compiler", [None, repeat("aot_eager"), repeat("inductor")])
def test_dtensors_and_tensor_parallelism_have_gloos_results(ranks: Ranks, compiler: str | None) -> None:
    assert ranks.call("dtensors", compiler, limit=LIMIT) == ["ok"] * ranks.size
