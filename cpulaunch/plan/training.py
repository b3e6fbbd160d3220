"""What the ranks train with: the backend, the precision, and what else they are told."""

from __future__ import annotations

from collections.abc import Mapping

from cpulaunch.config.config import Config
from cpulaunch.errors import PlanError
from cpulaunch.model.facts import Facts, HostFacts
from cpulaunch.plan.plan import LOCALHOST
from cpulaunch.plan.select import some


def chosen_backend(config: Config, facts: Facts, notes: list[str]) -> str:
    chosen: str = config["training.backend"]
    if chosen == "ccl" and facts.ccl_missing:
        raise PlanError(
            f"{config.where('training.backend')}: ccl can't be used: {facts.ccl_missing}",
            hint="--backend gloo works everywhere",
        )
    if chosen != "auto":
        return chosen
    if facts.ccl_missing:
        notes.append(f"backend gloo, as ccl can't be used: {facts.ccl_missing}")
        return "gloo"
    return "ccl"


def chosen_precision(config: Config, hosts: Mapping[str, HostFacts], notes: list[str]) -> str:
    """One precision for all ``hosts``: where the user hasn't said bf16, one that no host is slow in."""
    chosen: str = config["training.precision"]
    lacking = [name for name, facts in hosts.items() if facts.cpu_flags == ()]
    if chosen == "bf16" and lacking:
        whose = "this CPU has" if lacking == [LOCALHOST] else f"the CPU of {some(lacking)} has"
        if not config.is_set("training.precision"):
            notes.append(f"precision fp32, as {whose} no instructions for bf16")
            return "fp32"
        notes.append(f"bf16 is slow here: {whose} no instructions for it")
    return chosen
