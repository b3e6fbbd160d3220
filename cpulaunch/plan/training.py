"""What the ranks train with: the backend, the precision, and what else they are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cpulaunch.config.load import Config
from cpulaunch.config.settings import SETTINGS
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
        if not config.said("training.precision"):
            notes.append(f"precision fp32, as {whose} no instructions for bf16")
            return "fp32"
        notes.append(f"bf16 is slow here: {whose} no instructions for it")
    return chosen


def training_environment(config: Config) -> dict[str, str]:
    """What else the ranks are told of training: the settings that are not at their defaults."""
    values: dict[str, tuple[str, Callable[[Any], str]]] = {
        "CPULAUNCH_ENGINE": ("training.engine", str),
        "CPULAUNCH_COMPILE": ("training.compile", _as_digit),
        "CPULAUNCH_COMPRESS_GRADIENTS": ("training.compress_gradients", str),
        "CPULAUNCH_BUCKET_MB": ("training.bucket_mb", str),
        "CPULAUNCH_STATIC_GRAPH": ("training.static_graph", _as_digit),
        "CPULAUNCH_AS_WRITTEN": ("training.as_written", _as_digit),
    }
    return {
        name: text(config[key])
        for name, (key, text) in values.items()
        # One that is in the environment is of a job that we are in.
        if config[key] != SETTINGS[key].default or name in config.environ
    }


def _as_digit(switch: bool) -> str:
    return str(int(switch))
