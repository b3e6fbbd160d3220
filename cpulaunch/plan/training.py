"""The backend and the precision that ranks train with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cpulaunch.config.config import Config
from cpulaunch.errors import PlanError
from cpulaunch.model.facts import Facts
from cpulaunch.model.hosts import fold_hosts
from cpulaunch.model.rates import Cpu, ProductRates

WORTH_IT = 1.2
"""Minimum speed of bf16, as a multiple of fp32's, for ``auto`` to choose it."""

NO_FASTER = 0.95
"""If bf16 has less than this fraction of fp32's speed, messages call it slower, and up to the inverse, no
faster."""


class BackendDecision(NamedTuple):
    """The backend of torch.distributed, and a note if ``auto`` could not choose ccl."""

    backend: str
    note: str = ""


class PrecisionDecision(NamedTuple):
    """The precision in which every rank trains."""

    precision: str
    why: str = ""  # the reason, such as "bf16 is 1.9 times slower on this CPU"
    warning: str = ""  # why the user's choice of bf16 is slow
    measured: ProductRates | None = None  # None if a host was not measured

    def __str__(self) -> str:
        return f"precision {self.precision}" + (f" ({self.why})" if self.why else "")

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**self._asdict(), "measured": self.measured and self.measured._asdict()}


class HostSpeed(NamedTuple):
    """A host's CPU, its flags, and its measured rates, as far as they are known."""

    host: str
    cpu: Cpu | None
    flags: tuple[str, ...] | None
    rates: ProductRates | None  # with the ranks' number of threads


def decide_backend(config: Config, facts: Facts) -> BackendDecision:
    """Choose ccl if it can be used, unless the user chose another backend.

    Raises PlanError if the user chose ccl and it can't be used.
    """
    chosen = config.training.backend  # NO_BACKEND if the ranks are instances
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


def decide_precision(requested: str, hosts: Sequence[HostSpeed]) -> PrecisionDecision:
    """Decide on the precision: for a job in the planner, or in a rank that has no plan.

    ``requested`` is the setting's value.  All ranks wait for the slowest rank, so the lowest rates of all
    hosts decide.  If a host was not measured, bf16 is chosen only if it suits each host by its rates or, for
    a host without rates, by its CPU's flags.
    """
    slowest = _slowest(hosts)
    if requested == "auto":
        return _faster(slowest, hosts) if slowest else _suggested(hosts)
    if requested == "fp32":  # chosen for accuracy, so there is no warning that it is slow
        worth_it = slowest and slowest.bf16 >= WORTH_IT * slowest.fp32
        why = f"bf16 is {_comparison(slowest, hosts)}" if slowest and worth_it else ""
        return PrecisionDecision(requested, why, "", slowest)
    warning = ""
    if slowest:
        if slowest.bf16 < NO_FASTER * slowest.fp32:
            warning = f"bf16 is {_comparison(slowest, hosts)}"
    elif lacking := [host.host for host in hosts if host.flags == ()]:
        whose = f"the CPU of {fold_hosts(lacking)}" if len(hosts) > 1 else "the CPU"
        warning = f"{whose} has no instructions for bf16"
    if warning:
        warning = f"precision {requested} is slow here: {warning}"
    return PrecisionDecision(requested, "", warning, slowest)


def _slowest(hosts: Sequence[HostSpeed]) -> ProductRates | None:
    """Return the lowest rates of all hosts; None if a host was not measured."""
    known = [host.rates for host in hosts if host.rates]
    if not known or len(known) < len(hosts):
        return None
    first = min(known, key=lambda rates: rates.bf16)
    return first._replace(fp32=min(rates.fp32 for rates in known))


def _faster(slowest: ProductRates, hosts: Sequence[HostSpeed]) -> PrecisionDecision:
    comparison = _comparison(slowest, hosts)
    if slowest.bf16 < WORTH_IT * slowest.fp32:
        return PrecisionDecision("fp32", f"bf16 is {comparison}", "", slowest)
    return PrecisionDecision("bf16", comparison.replace("faster", "faster than fp32", 1), "", slowest)


def _comparison(slowest: ProductRates, hosts: Sequence[HostSpeed]) -> str:
    """Compare bf16 with fp32: ``"1.9 times slower on this CPU, 84 against 160 GFLOP/s"``."""
    ratio = slowest.bf16 / slowest.fp32
    if ratio < NO_FASTER:
        how = f"{1 / ratio:.1f} times slower"
    elif ratio < 1 / NO_FASTER:
        how = "no faster"
    else:
        how = f"{'only ' if ratio < WORTH_IT else ''}{ratio:.1f} times faster"
    where = "this CPU" if len({host.cpu for host in hosts}) == 1 else "the slowest host"
    return f"{how} on {where}, {slowest.bf16 / 1e9:.0f} against {slowest.fp32 / 1e9:.0f} GFLOP/s"


def _suggested(hosts: Sequence[HostSpeed]) -> PrecisionDecision:
    """Return fp32 if any host suggests it, else bf16; the first such host gives the reason."""
    suggestions = [(host, *_suggestion(host)) for host in hosts]
    unmeasured = [row for row in suggestions if not row[0].rates]
    host, precision, reason = next((row for row in suggestions if row[1] == "fp32"), unmeasured[0])
    if len({(each.cpu, each.flags) for each in hosts}) > 1 or host.rates:
        return PrecisionDecision(precision, f"not measured; {host.host}: {reason}")
    return PrecisionDecision(precision, f"not measured; {reason.replace('its', 'the', 1)}")


def _suggestion(host: HostSpeed) -> tuple[str, str]:
    """Return the precision that a host's rates or its CPU's flags suggest, and the reason."""
    if host.rates:
        if host.rates.bf16 < WORTH_IT * host.rates.fp32:
            return "fp32", "bf16 was measured to be slower there"
        return "bf16", "bf16 was measured to be faster there"
    if host.flags is None:
        return "fp32", "its CPU's flags are not known"
    if "amx_bf16" in host.flags:
        return "bf16", "its CPU has amx_bf16"
    if "bf16" in host.flags:
        return "bf16", "its CPU has Arm's bf16"
    if "avx512_bf16" in host.flags:
        # On a Xeon without AMX, products of matrices took 1.9 times as long as in fp32.
        if host.cpu and host.cpu.vendor == "AuthenticAMD":
            return "bf16", "its CPU is AMD's and has avx512_bf16"
        return "fp32", "its CPU has avx512_bf16 and no amx_bf16"
    return "fp32", "its CPU has no instructions for bf16"
