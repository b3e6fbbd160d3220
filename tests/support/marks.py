"""Marks for parameters of tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from cpulaunch.launchers import MPIS


def repeat(*values: Any) -> Any:
    """Values of a parameter much like another case: only ``scripts/test.sh --all`` tests them."""
    return pytest.param(*values, marks=pytest.mark.repeats)


def slow(*values: Any) -> Any:
    """Values of a parameter with which a test is too slow for ``scripts/test.sh --fast``."""
    return pytest.param(*values, marks=pytest.mark.slow)


def usually_under(*launchers: str) -> pytest.MarkDecorator:
    """``launcher_options`` of these launchers, and of all others under ``scripts/test.sh --all``.

    For tests that hardly depend on the launcher.  Different tests use different MPIs as the usual one.
    """
    usual = [name if name == "local" else slow(name) for name in launchers]
    others = [repeat(name) for name in ("local", *MPIS) if name not in launchers]
    return pytest.mark.parametrize("launcher_options", [*usual, *others], indirect=True)


def by_launcher(rows: Iterable[tuple[Any, ...]], usual: Collection[tuple[Any, ...]]) -> list[Any]:
    """Rows that begin with a launcher: rows of local are fast, rows of ``usual`` are slow, all others are
    repeats."""
    return [row if row[0] == "local" else slow(*row) if row in usual else repeat(*row) for row in rows]
