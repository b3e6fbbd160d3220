"""The precision and the engine of a rank, as a table.  Ranks compute in the planned precision."""

from __future__ import annotations

import pytest
from support.command import HAS_BF16
from support.marks import repeat

from cpulaunch.model.rates import Cpu
from cpulaunch.runtime.change.engines.base import Engine, Measured
from cpulaunch.runtime.change.engines.ipex import IpexEngine
from cpulaunch.runtime.change.engines.native import ENGINE as NATIVE
from cpulaunch.runtime.change.engines.native import TORCH
from cpulaunch.runtime.change.precision import Choice, check_precision, choose
from cpulaunch.runtime.settings import TrainingSettings
from runtime.conftest import Start

pytestmark = pytest.mark.usefixtures("fitting_transformers")

AMX, AVX = ("amx_bf16", "avx512_bf16"), ("avx512_bf16",)


class NoIpex(IpexEngine):
    """The engine ipex without IPEX installed."""

    def version(self) -> None:
        return None


@pytest.fixture(autouse=True)
def xeon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose for an Intel CPU on any machine, because AMD's CPUs have another rule."""
    monkeypatch.setattr("cpulaunch.runtime.change.precision.cpu_here", lambda: Cpu("GenuineIntel", "Xeon"))


def choice_of(settings: dict, flags: tuple[str, ...] | None, torch: str, ipex: Engine) -> Choice:
    return choose(
        TrainingSettings(**settings),
        flags,
        torch,
        {"native": NATIVE, "torch": TORCH, "ipex": ipex}.__getitem__,
    )


@pytest.mark.parametrize(
    ("settings", "flags", "torch", "ipex", "expected"),
    [
        ({}, AMX, "2.13.0+cpu", None, ("native", "bf16", "amx_bf16")),
        ({}, AVX, "2.13.0+cpu", None, ("native", "fp32", "not measured; the CPU has avx512_bf16 and no amx_bf16")),
        ({}, None, "2.13.0+cpu", None, ("native", "fp32", "not measured; the CPU's flags are not known")),
        ({}, (), "2.13.0+cpu", None, ("native", "fp32", "no instructions for bf16")),
        ({"engine": "native"}, (), "2.8.0", None, ("native", "fp32", "no instructions for bf16")),
        ({"precision": "bf16"}, (), "2.8.0", None, ("native", "bf16", "CPULAUNCH_PRECISION is set")),
        ({"precision": "bf16", "in_job": True}, (), "2.8.0", None, ("native", "bf16", "as planned")),
        ({"precision": "bf16", "in_job": True}, (), "2.8.0", "2.8.0", ("native", "bf16", "IPEX does bf16 only on CPUs")),
        ({"precision": "fp32"}, AMX, "2.8.0", "2.8.0", ("native", "fp32", "CPULAUNCH_PRECISION is set")),
        ({"precision": "fp32", "in_job": True, "engine": "ipex"}, AMX, "2.8.0", "2.8.0", ("native", "fp32", "as planned")),
        ({}, AMX, "2.13.0+cpu", "2.8.0", ("native", "bf16", "IPEX 2.8.0 is for torch 2.8.*, and this is torch 2.13.0+cpu")),
        ({}, AMX, "2.8.0+cpu", "2.8.0", ("native", "bf16", "a step of ipex takes 0.93 x native's with torch 2.8")),
        ({"precision": "bf16"}, AVX, "2.8.0+cpu", "2.8.0", ("native", "bf16", "ipex has not been measured")),
        ({}, ("bf16",), "2.8.0+cpu", "2.8.0", ("native", "bf16", "IPEX does bf16 only on CPUs")),
        ({"engine": "ipex"}, AMX, "2.8.0+cpu", "2.8.0", ("ipex", "bf16", "as requested, version 2.8.0")),
        ({"engine": "ipex"}, AMX, "2.8.0+cpu", None, ("native", "bf16", "IPEX is not installed")),
        ({"engine": "ipex"}, AMX, "2.13.0", "2.8.0", ("native", "bf16", "is for torch 2.8.*")),
        ({"engine": "ipex", "precision": "bf16"}, (), "2.8.0", "2.8.0", ("native", "bf16", "IPEX does bf16 only on CPUs")),
        ({"engine": "native"}, AMX, "2.8.0", "2.8.0", ("native", "bf16", "as requested")),
        ({"engine": "torch"}, AMX, "2.8.0", "2.8.0", ("torch", "bf16", "as requested")),
        ({"engine": "torch"}, AVX, "2.13.0+cpu", None, ("torch", "fp32", "not measured; the CPU has avx512_bf16")),
    ],
)  # fmt: skip
def test_the_chosen_precision_and_engine(settings, flags, torch, ipex, expected) -> None:
    choice = choice_of(settings, flags, torch, IpexEngine(ipex) if ipex else NoIpex())
    assert (choice.engine, choice.precision) == expected[:2]
    assert expected[2] in choice.why
    assert "\n" not in str(choice)


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.5, "ipex"), (0.79, "ipex"), (0.8, "native"), (1.5, "native")]
)
def test_auto_chooses_an_engine_measured_to_be_much_faster(ratio: float, expected: str) -> None:
    ipex = IpexEngine("2.8.0")
    ipex.measured = (
        Measured("avx512_bf16", "2.8", 0.1, "another"),
        Measured("amx_bf16", "2.8", ratio, "here"),
    )
    assert choice_of({}, AMX, "2.8.0", ipex).engine == expected


@pytest.mark.parametrize(
    ("precision", "flags", "warned"),
    [("bf16", (), True), ("bf16", AVX, False), ("bf16", None, False), ("fp32", (), False)],
)
def test_a_rank_warns_if_its_cpu_lacks_instructions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, precision, flags, warned
) -> None:
    monkeypatch.setattr("cpulaunch.runtime.log._logged", set())
    monkeypatch.setenv("RANK", "3")
    settings = TrainingSettings(in_job=True, precision=precision)
    check_precision(settings, flags)
    check_precision(settings, flags)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == warned
    assert all(
        "warning: precision bf16 is slow here: the CPU has no instructions for bf16" in line for line in lines
    )


@pytest.mark.slow
@pytest.mark.parametrize("program", ["prepared_on_a_slow_cpu", repeat("plain_on_a_slow_cpu")])
def test_a_rank_whose_cpu_lacks_instructions_computes_as_planned(job: Start, program: str) -> None:
    """Rank 1 sees no flags for bf16.  Once, it computed in fp32, and rank 0 in bf16."""
    done = job(2, program, options=("--precision", "bf16"))
    assert [result["kinds"] for result in done.results] == [["torch.bfloat16"], ["torch.bfloat16"]]
    lines = [line for line in done.stderr.splitlines() if "warning: precision bf16 is slow here" in line]
    warned = [1] if HAS_BF16 else [0, 1]
    assert sorted(line.partition(" cpulaunch: ")[0] for line in lines) == [f"[{rank}]" for rank in warned]
