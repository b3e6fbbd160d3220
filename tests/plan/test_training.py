"""The one decision on precision, which the planner and ranks without a plan share."""

from __future__ import annotations

import pytest

from cpulaunch.model.facts import HostFacts
from cpulaunch.model.topology import Topology
from cpulaunch.plan.training import PrecisionDecision, decide_precision, without_bf16

BF16, FP32 = PrecisionDecision("bf16"), PrecisionDecision("fp32")


@pytest.mark.parametrize(
    ("requested", "is_set", "lacking", "decision"),
    [
        ("bf16", False, [], BF16),
        ("bf16", True, [], BF16),
        ("fp32", True, [], FP32),
        ("fp32", True, ["localhost"], FP32),  # what the user wants is no surprise
        (
            "bf16", False, ["localhost"],
            PrecisionDecision("fp32", "precision fp32, as this CPU has no instructions for bf16"),
        ),
        (
            "bf16", False, ["a", "b"],
            PrecisionDecision("fp32", "precision fp32, as the CPU of a, b has no instructions for bf16"),
        ),
        (
            "bf16", True, ["localhost"],
            PrecisionDecision("bf16", "bf16 is slow here: this CPU has no instructions for it"),
        ),
        (
            "bf16", True, [f"n{i}" for i in range(6)],
            PrecisionDecision(
                "bf16", "bf16 is slow here: the CPU of n0, n1, n2, n3 and 2 more has no instructions for it"
            ),
        ),
    ],
)  # fmt: skip
def test_bf16_that_somebody_asked_for_stays_bf16(
    requested: str, is_set: bool, lacking: list[str], decision: PrecisionDecision
) -> None:
    assert decide_precision(requested, is_set=is_set, lacking=lacking) == decision


def test_a_host_lacks_bf16_only_where_somebody_has_looked() -> None:
    topology = Topology(())
    hosts = {
        "old": HostFacts(topology, cpu_flags=()),
        "new": HostFacts(topology, cpu_flags=("amx_bf16",)),
        "arm": HostFacts(topology, cpu_flags=("bf16",)),
        "unknown": HostFacts(topology, cpu_flags=None),
    }
    assert without_bf16(hosts) == ["old"]
