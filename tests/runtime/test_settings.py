"""The settings that a rank reads from its environment."""

from __future__ import annotations

import pytest

from cpulaunch.errors import UsageError
from cpulaunch.runtime.settings import TrainingSettings, training_settings


def test_settings_are_read_from_the_environment() -> None:
    assert training_settings({}) == TrainingSettings()
    read = training_settings(
        {"CPULAUNCH_JOB_ID": "j", "CPULAUNCH_BACKEND": "ccl", "CPULAUNCH_PRECISION": "bf16", "CPULAUNCH_ENGINE": "ipex",
         "CPULAUNCH_COMPILE": "1", "CPULAUNCH_COMPRESS_GRADIENTS": "bf16", "CPULAUNCH_BUCKET_MB": "50",
         "CPULAUNCH_STATIC_GRAPH": "1", "CPULAUNCH_AS_WRITTEN": "1"}
    )  # fmt: skip
    assert read == TrainingSettings(True, "ccl", "bf16", "ipex", True, "bf16", 50, True, True)


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("CPULAUNCH_PRECISION", "fp16", "bf16, fp32"),
        ("CPULAUNCH_ENGINE", "apex", "ipex, native"),
        ("CPULAUNCH_COMPRESS_GRADIENTS", "fp8", "none, bf16"),
        ("CPULAUNCH_BUCKET_MB", "0", "a whole number of at least 1, or auto"),
    ],
)
def test_an_invalid_value_is_named(name: str, value: str, valid: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is '{value}': expected .*{valid}"):
        training_settings({name: value})
