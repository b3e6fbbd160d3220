"""Which engine is taken, as a table; and what costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cpulaunch.errors import UsageError
from cpulaunch.runtime.settings import TrainingSettings, training_settings

AMX, AVX = ("amx_bf16", "avx512_bf16"), ("avx512_bf16",)


@pytest.mark.parametrize(
    ("plan", "flags", "torch", "ipex", "expected"),
    [
        ({}, AMX, "2.13.0+cpu", None, ("native", "bf16", "amx_bf16")),
        ({}, AVX, "2.13.0+cpu", None, ("native", "bf16", "avx512_bf16")),
        ({}, (), "2.13.0+cpu", None, ("native", "fp32", "no instructions for bf16")),
        ({"precision": "bf16"}, (), "2.8.0", "2.8.0", ("native", "fp32", "no instructions for bf16")),
        ({"precision": "fp32"}, AMX, "2.8.0", "2.8.0", ("native", "fp32", "")),
        ({}, AMX, "2.13.0+cpu", "2.8.0", ("native", "bf16", "IPEX 2.8.0 is for torch 2.8.*, and this is torch 2.13.0+cpu")),
        ({}, AMX, "2.8.0+cpu", "2.8.0", ("native", "bf16", "a step of ipex takes 0.")),
        ({}, AVX, "2.8.0+cpu", "2.8.0", ("native", "bf16", "nobody has measured ipex")),
        ({}, ("bf16",), "2.8.0+cpu", "2.8.0", ("native", "bf16", "avx512 only")),
        ({"engine": "ipex"}, AMX, "2.8.0+cpu", "2.8.0", ("ipex", "bf16", "as asked, IPEX 2.8.0")),
        ({"engine": "ipex"}, AMX, "2.8.0+cpu", None, ("native", "bf16", "IPEX is not installed")),
        ({"engine": "ipex"}, AMX, "2.13.0", "2.8.0", ("native", "bf16", "is for torch 2.8.*")),
        ({"engine": "ipex"}, (), "2.8.0", "2.8.0", ("native", "bf16", "avx512 only")),
        ({"engine": "native"}, (), "2.8.0", None, ("native", "bf16", "it is slower than fp32")),
        ({"engine": "native"}, AMX, "2.8.0", "2.8.0", ("native", "bf16", "as asked")),
    ],
)  # fmt: skip
def test_the_engine(plan, flags, torch, ipex, expected) -> None:
    from cpulaunch.runtime.precision import choose

    choice = choose(TrainingSettings(**plan), flags, torch, ipex)
    assert (choice.engine, choice.precision) == expected[:2]
    assert expected[2] in choice.why
    assert "\n" not in str(choice)


def test_ipex_is_taken_by_itself_where_it_was_measured_to_be_much_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cpulaunch.runtime import precision

    monkeypatch.setattr(precision, "MEASURED", (precision.Measured("amx_bf16", "2.8", 0.5, "here"),))
    assert precision.choose(TrainingSettings(), AMX, "2.8.0", "2.8.0").engine == "ipex"


def test_the_plan_is_read_from_the_environment() -> None:
    assert training_settings({}) == TrainingSettings()
    said = training_settings(
        {"CPULAUNCH_JOB_ID": "j", "CPULAUNCH_BACKEND": "ccl", "CPULAUNCH_PRECISION": "bf16", "CPULAUNCH_ENGINE": "ipex",
         "CPULAUNCH_COMPILE": "1", "CPULAUNCH_COMPRESS_GRADIENTS": "bf16", "CPULAUNCH_BUCKET_MB": "50",
         "CPULAUNCH_STATIC_GRAPH": "1", "CPULAUNCH_AS_WRITTEN": "1"}
    )  # fmt: skip
    assert said == TrainingSettings(True, "ccl", "bf16", "ipex", True, "bf16", 50, True, True)


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("CPULAUNCH_PRECISION", "fp16", "bf16, fp32"),
        ("CPULAUNCH_ENGINE", "apex", "auto, ipex, native"),
        ("CPULAUNCH_COMPRESS_GRADIENTS", "fp8", "none, bf16"),
        ("CPULAUNCH_BUCKET_MB", "0", "a whole number of at least 1, or auto"),
    ],
)
def test_a_value_that_does_not_exist_is_named(name: str, value: str, valid: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is '{value}': expected .*{valid}"):
        training_settings({name: value})


def test_the_public_names_and_what_importing_them_costs() -> None:
    code = (
        "import sys, cpulaunch; assert 'torch' not in sys.modules and len(sys.modules) < 60, len(sys.modules);"
        "assert set(cpulaunch.__all__) <= set(dir(cpulaunch)); import cpulaunch.agent.identity;"
        "assert cpulaunch.rank() == 3 and 'torch' in sys.modules and cpulaunch.agent.identity;"
        "import inspect; assert all(inspect.getdoc(getattr(cpulaunch, n)) for n in cpulaunch.__all__)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": ":".join(sys.path), "RANK": "3"},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_no_other_name_is_public() -> None:
    import cpulaunch

    assert cpulaunch.__all__ == [
        "accumulate",
        "autocast",
        "init",
        "is_main",
        "prepare",
        "rank",
        "unwrap",
        "world_size",
    ]
    with pytest.raises(AttributeError, match="has no attribute 'prepaer'"):
        cpulaunch.prepaer  # noqa: B018
