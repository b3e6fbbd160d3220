"""The decision on precision, which the planner and ranks without a plan share."""

from __future__ import annotations

import pytest

from cpulaunch.model.rates import Cpu, ProductRates
from cpulaunch.plan.training import HostSpeed, decide_precision

INTEL, AMD = Cpu("GenuineIntel", "Xeon"), Cpu("AuthenticAMD", "EPYC")
AMX, AVX, NO_FLAGS = ("amx_bf16", "avx512_bf16"), ("avx512_bf16",), ()


def host(
    fp32: float = 0, bf16: float = 0, *, flags=AVX, cpu: Cpu | None = INTEL, name="localhost"
) -> HostSpeed:
    """Return a host whose ranks were measured at these GFLOP/s, or that was not measured."""
    return HostSpeed(name, cpu, flags, ProductRates(14, fp32 * 1e9, bf16 * 1e9) if fp32 else None)


@pytest.mark.parametrize(
    ("hosts", "precision", "why"),
    [
        ([host(160, 84)], "fp32", "bf16 is 1.9 times slower on this CPU, 84 against 160 GFLOP/s"),
        ([host(160, 84, flags=AMX)], "fp32", "bf16 is 1.9 times slower on this CPU, 84 against 160 GFLOP/s"),
        ([host(100, 119)], "fp32", "bf16 is only 1.2 times faster on this CPU, 119 against 100 GFLOP/s"),
        ([host(100, 99)], "fp32", "bf16 is no faster on this CPU, 99 against 100 GFLOP/s"),
        ([host(100, 120, flags=NO_FLAGS)], "bf16", "1.2 times faster than fp32 on this CPU, 120 against 100 GFLOP/s"),
        ([host(160, 800)] * 3, "bf16", "5.0 times faster than fp32 on this CPU, 800 against 160 GFLOP/s"),
        # The lowest rates of all hosts count, as all ranks wait for the slowest.
        ([host(160, 800), host(160, 84, cpu=AMD)], "fp32", "bf16 is 1.9 times slower on the slowest host, 84 against 160 GFLOP/s"),
        ([host(40, 60), host(100, 30, cpu=AMD)], "fp32", "bf16 is 1.3 times slower on the slowest host, 30 against 40 GFLOP/s"),
        ([host(40, 60), host(100, 80, cpu=AMD)], "bf16", "1.5 times faster than fp32 on the slowest host, 60 against 40 GFLOP/s"),
        # Without a measurement, the flags decide.
        ([host(flags=AMX)], "bf16", "not measured; the CPU has amx_bf16"),
        ([host(flags=AVX)], "fp32", "not measured; the CPU has avx512_bf16 and no amx_bf16"),
        ([host(flags=AVX, cpu=None)], "fp32", "not measured; the CPU has avx512_bf16 and no amx_bf16"),
        ([host(flags=AVX, cpu=AMD)], "bf16", "not measured; the CPU is AMD's and has avx512_bf16"),
        ([host(flags=("bf16",), cpu=Cpu("0x41"))], "bf16", "not measured; the CPU has Arm's bf16"),
        ([host(flags=NO_FLAGS)], "fp32", "not measured; the CPU has no instructions for bf16"),
        ([host(flags=None)], "fp32", "not measured; the CPU's flags are not known"),
        ([host(flags=AMX, name="a"), host(flags=NO_FLAGS, name="b")], "fp32", "not measured; b: its CPU has no instructions for bf16"),
        ([host(160, 84, name="a"), host(flags=AMX, name="b")], "fp32", "not measured; a: bf16 was measured to be slower there"),
        ([host(160, 800, name="a"), host(flags=AMX, name="b")], "bf16", "not measured; b: its CPU has amx_bf16"),
    ],
)  # fmt: skip
def test_auto_chooses_the_faster_precision(hosts: list[HostSpeed], precision: str, why: str) -> None:
    decision = decide_precision("auto", hosts)
    assert (decision.precision, decision.why, decision.warning) == (precision, why, "")
    assert str(decision) == f"precision {precision} ({why})"


@pytest.mark.parametrize(
    ("requested", "hosts", "warning"),
    [
        ("bf16", [host(160, 84)], "bf16 is 1.9 times slower on this CPU, 84 against 160 GFLOP/s"),
        ("bf16", [host(100, 110)], ""),
        ("bf16", [host(160, 800)], ""),
        ("bf16", [host(flags=AVX)], ""),
        ("bf16", [host(flags=NO_FLAGS)], "the CPU has no instructions for bf16"),
        ("bf16", [host(flags=NO_FLAGS, name="a"), host(name="b")], "the CPU of a has no instructions for bf16"),
        ("bf16", [host(flags=NO_FLAGS, name=f"n{i}") for i in range(6)],
         "the CPU of n[0-5] has no instructions for bf16"),
    ],
)  # fmt: skip
def test_the_users_slower_choice_is_kept_with_a_warning(
    requested: str, hosts: list[HostSpeed], warning: str
) -> None:
    decision = decide_precision(requested, hosts)
    assert (decision.precision, decision.why) == (requested, "")
    assert decision.warning == (f"precision {requested} is slow here: {warning}" if warning else "")
    assert str(decision) == f"precision {requested}"


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (host(160, 84), ""),
        (host(100, 110), ""),
        (host(160, 800), "bf16 is 5.0 times faster on this CPU, 800 against 160 GFLOP/s"),
        (host(flags=NO_FLAGS), ""),
    ],
)
def test_there_is_no_warning_if_the_user_chooses_fp32(one: HostSpeed, why: str) -> None:
    decision = decide_precision("fp32", [one])
    assert (decision.precision, decision.why, decision.warning) == ("fp32", why, "")
