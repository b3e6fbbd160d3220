"""Ranks that tests share.  They need the compiled group (`cpulaunch ccl build`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks

from cpulaunch.ccl.installed import Built


@pytest.fixture(scope="session")
def two(built: Built) -> Iterator[Ranks]:
    """Two ranks."""
    ranks = Ranks(2)
    yield ranks
    assert ranks.close() == [0, 0]


@pytest.fixture(scope="session")
def three(built: Built) -> Iterator[Ranks]:
    """Three ranks, which oversubscribe a machine with two cores."""
    ranks = Ranks(3)
    yield ranks
    assert ranks.close() == [0, 0, 0]


@pytest.fixture(scope="session")
def four(built: Built) -> Iterator[Ranks]:
    """Four ranks."""
    ranks = Ranks(4)
    yield ranks
    assert ranks.close() == [0, 0, 0, 0]


@pytest.fixture(
    params=[
        2,
        pytest.param(3, marks=[pytest.mark.slow, pytest.mark.repeats]),
        pytest.param(4, marks=[pytest.mark.slow, pytest.mark.repeats]),
    ],
    ids=lambda size: f"{size} ranks",
)
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Runs a test with two ranks, and under ``scripts/test.sh --all`` also with three and four.

    tests/cluster/test_collectives.py always tests four ranks on three hosts, and tests/ccl/test_native.py
    tests many numbers of ranks.
    """
    return request.getfixturevalue({2: "two", 3: "three", 4: "four"}[request.param])
