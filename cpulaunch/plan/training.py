"""What the ranks train with: the backend and the precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cpulaunch.config.config import Config
from cpulaunch.errors import PlanError
from cpulaunch.model.facts import Facts, HostFacts
from cpulaunch.model.hosts import LOCALHOST
from cpulaunch.wording import shortened


class BackendDecision(NamedTuple):
    """The backend of torch.distributed, and a note on why it is another one than ``auto`` prefers."""

    backend: str
    note: str = ""


class PrecisionDecision(NamedTuple):
    """The precision that every rank trains in, and a note where the CPUs make it a surprise."""

    precision: str
    note: str = ""


def decide_backend(config: Config, facts: Facts) -> BackendDecision:
    """ccl where it can be used, unless the user chose another.

    Raises PlanError where the user chose ccl and it can't be used.
    """
    chosen = config.training.backend  # NO_BACKEND where the ranks are instances
    if chosen == "ccl" and facts.ccl_missing:
        raise PlanError(
            f"{config.where(Config.training.backend)}: ccl can't be used: {facts.ccl_missing}",
            hint="--backend gloo works everywhere",
        )
    if chosen != "auto":
        return BackendDecision(chosen)
    if facts.ccl_missing:
        return BackendDecision("gloo", f"backend gloo, as ccl can't be used: {facts.ccl_missing}")
    return BackendDecision("ccl")


def decide_precision(requested: str, *, is_set: bool, lacking: Sequence[str]) -> PrecisionDecision:
    """The one decision on precision: the planner's for a job, a rank's where no plan was made for it.

    ``requested`` is the setting's value, ``is_set`` whether the user has set it.  ``lacking`` are the hosts
    whose CPU has no instructions for bf16; ``["localhost"]`` is this machine.  The precision is the same on
    all hosts: bf16 that the user asked for stays bf16, however slow; else one such host makes it fp32.
    """
    if requested != "bf16" or not lacking:
        return PrecisionDecision(requested)
    whose = "this CPU has" if list(lacking) == [LOCALHOST] else f"the CPU of {shortened(list(lacking))} has"
    if is_set:
        return PrecisionDecision("bf16", f"bf16 is slow here: {whose} no instructions for it")
    return PrecisionDecision("fp32", f"precision fp32, as {whose} no instructions for bf16")


def without_bf16(hosts: Mapping[str, HostFacts]) -> list[str]:
    """The names of those hosts whose CPU is known to have no instructions for bf16."""
    return [name for name, facts in hosts.items() if facts.cpu_flags == ()]
