"""Metrics that a program states, with and without instances."""

from __future__ import annotations

from typing import Any

import pytest

import cpulaunch
from cpulaunch.errors import UsageError


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "1"), ("2.5", "2.5"), (float("nan"), "nan"), (float("inf"), "inf"), (1e200, "1e+200"),
     pytest.param(10**400, "inf", id="much"), pytest.param(-(10**400), "-inf", id="little")],
)  # fmt: skip
def test_a_metric_with_any_value_is_printed_as_a_line(
    capsys: pytest.CaptureFixture[str], value: Any, text: str
) -> None:
    cpulaunch.metric("loss", value, "ms")
    assert capsys.readouterr().out == f"CPULAUNCH_METRIC loss={text} ms\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("loss", None), "the value of 'loss' must be a number, got a NoneType"),
        (("loss", "much"), "the value of 'loss' must be a number, got a str"),
        (("loss", [1.0]), "the value of 'loss' must be a number, got a list"),
        ((3, 1.0), "the name must be a string, got 3"),
        (("loss", 1.0, None), "the unit must be a string, got None"),
        (("a b", 1.0), "'a b' can't be the name of a metric"),
    ],
)
def test_an_invalid_metric_is_refused(arguments: Any, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        cpulaunch.metric(*arguments)
