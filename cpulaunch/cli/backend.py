"""Checks whether ranks can use ccl and the kernels, and builds them if necessary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cpulaunch.config.config import Config
from cpulaunch.config.setting import Setting
from cpulaunch.errors import HostError
from cpulaunch.plan.communication import ALGORITHMS, needs_oneccl
from cpulaunch.plan.plan import Plan


def ensure_ccl(config: Config, *, build: bool, tell: Callable[[str], None]) -> str | None:
    """Return why this host can't use the backend ccl; None if it can, or if ccl is not wanted.

    With ``build``, a missing process group is built now, which takes up to a minute, with progress on stderr.
    Without it, ``tell`` gets a line that it is missing.  Raises HostError if the user insists on ccl and it
    can't be used.
    """
    if config.training.backend not in ("auto", "ccl"):
        return None
    from cpulaunch.ccl import bindings
    from cpulaunch.ccl.installed import state

    there = state()
    if bindings.are_wanted(config.ccl.binding, there) or there.problem is None:
        return None
    from cpulaunch.ccl.build import build as build_group
    from cpulaunch.ccl.build import check
    from cpulaunch.cli.progress import BuildProgress

    try:
        if build:
            with BuildProgress() as progress:
                build_group(progress, patient=False)
        else:
            check(there)
            way = "a run builds it first, or `cpulaunch ccl build`"
            obstacle = there.group_obstacle
            is_not = f"is built, but not loaded, as {obstacle}" if obstacle else "is not built yet"
            tell(f"the ccl process group {is_not}: {way}")
    except HostError as e:
        if build and config.training.backend == "ccl":
            raise
        return f"{e} ({e.hint})" if e.hint else str(e)
    return None


def is_to_be_built(config: Config) -> bool:
    """Return whether a run would build the process group first."""
    if config.training.backend not in ("auto", "ccl"):
        return False
    from cpulaunch.ccl import bindings
    from cpulaunch.ccl.installed import state

    there = state()
    return not bindings.are_wanted(config.ccl.binding, there) and there.problem is not None


def ensure_oneccl(config: Config, plan: Plan) -> str | None:
    """Build the module with oneCCL in it, if the plan needs it and this host lacks it.

    Returns why that is impossible, or None; raises HostError if the user insists on oneCCL.
    """
    if not needs_oneccl(plan.transport) or config.ccl.binding == "oneccl_bind_pt":
        return None
    from cpulaunch.ccl.build import build
    from cpulaunch.ccl.installed import state
    from cpulaunch.cli.progress import BuildProgress

    if state().oneccl_problem is None:
        return None
    try:
        with BuildProgress() as progress:
            build(progress, oneccl=True, patient=False)
    except HostError as e:
        ours: tuple[Setting[Any], ...] = (Config.ccl.transport, Config.ccl.worker_count)
        chosen = any(config.is_set(setting) for setting in ours)
        if chosen or any(config.environ.get(name) for name in ALGORITHMS):
            raise
        return str(e)
    return None


def ensure_kernels(config: Config) -> str | None:
    """Build the kernels of the native engine, if ranks would use them and this host lacks them.

    Returns why that is impossible, or None.
    """
    if config.training.engine not in ("auto", "native") or config.training.as_written:
        return None
    from cpulaunch.ccl.build import build_kernels
    from cpulaunch.ccl.installed import state
    from cpulaunch.cli.progress import BuildProgress

    if state().kernels_problem is None:
        return None
    try:
        with BuildProgress("kernels") as progress:
            build_kernels(progress, patient=False)
    except HostError as e:
        return str(e)
    return None


def ccl_files(config: Config) -> tuple[str, ...]:
    """Return the files of the ccl group, ours or Intel's, which must be the same on all hosts."""
    if config.training.backend not in ("auto", "ccl"):
        return ()
    from cpulaunch.ccl import bindings
    from cpulaunch.ccl.installed import state

    there = state()
    if bindings.are_wanted(config.ccl.binding, there):
        return bindings.package_files(there)
    built = there.built
    return (str(built.module), str(built.core.file)) if built else ()


def ccl_lines(binding: str) -> Iterator[tuple[str, str]]:
    """Yield what the ranks would use for ccl and why, as (label, text), for ``ccl info`` and ``env``."""
    from cpulaunch.ccl import bindings
    from cpulaunch.ccl.installed import describe, state

    there = state()
    yield from describe(there, binding)
    if binding == "oneccl_bind_pt" and there.bindings_fit and (problem := bindings.loading_problem()):
        yield "but", f"oneccl_bind_pt does not load, so the ranks will fail: {problem}"
