"""Marks for parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest


def repeat(*values: Any) -> Any:
    """Values of a parameter that is much like another one: only ``scripts/test.sh --all`` runs it."""
    return pytest.param(*values, marks=pytest.mark.repeats)
