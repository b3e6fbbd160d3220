"""Checks whether ranks can use the backend ccl and the kernels, and builds them if necessary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cpulaunch.config.config import Config
from cpulaunch.config.setting import Setting
from cpulaunch.errors import HostError
from cpulaunch.plan.communication import ALGORITHMS, needs_oneccl
from cpulaunch.plan.plan import Plan

if TYPE_CHECKING:
    from cpulaunch.ccl.installed import State


def _own_group(config: Config) -> State | None:
    """Return the state of cpulaunch's own group; None if ranks use another backend or binding."""
    if config.training.backend not in ("auto", "ccl"):
        return None
    from cpulaunch.ccl import bindings
    from cpulaunch.ccl.installed import state

    found = state()
    return None if bindings.are_wanted(config.ccl.binding, found) else found


def ensure_ccl(config: Config, *, build: bool, tell: Callable[[str], None]) -> str | None:
    """Return why this host can't use the backend ccl; None if it can, or if the settings exclude ccl.

    With ``build``, build a missing process group, which takes up to a minute, and show progress on stderr.
    Without it, report through ``tell`` that the group is missing.  Raises HostError if the settings require
    ccl and it can't be built.
    """
    group = _own_group(config)
    if group is None or group.problem is None:
        return None
    from cpulaunch.ccl.build import build as build_group
    from cpulaunch.ccl.build import check
    from cpulaunch.cli.progress import BuildProgress

    try:
        if build:
            with BuildProgress() as progress:
                build_group(progress, patient=False)
        else:
            check(group)
            obstacle = group.group_obstacle
            why = f"is built, but can't be loaded, as {obstacle}" if obstacle else "is not built yet"
            tell(f"the ccl process group {why}: a run or `cpulaunch ccl build` builds it")
    except HostError as e:
        if build and config.training.backend == "ccl":
            raise
        return f"{e} ({e.hint})" if e.hint else str(e)
    return None


def needs_build(config: Config) -> bool:
    """Return whether a run would build the process group first."""
    group = _own_group(config)
    return group is not None and group.problem is not None


def ensure_oneccl(config: Config, plan: Plan) -> str | None:
    """Build the oneCCL module if the plan needs it and it is missing.

    Returns the error if the build fails, else None.  Raises HostError if the user has chosen oneCCL.
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
    """Build the kernels of the native engine if ranks use them and they are missing.

    Returns the error if the build fails, else None.
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
    """Return the files of the process group ccl, which must be equal on all hosts."""
    if config.training.backend not in ("auto", "ccl"):
        return ()
    from cpulaunch.ccl import bindings
    from cpulaunch.ccl.installed import state

    found = state()
    if bindings.are_wanted(config.ccl.binding, found):
        return bindings.package_files(found)
    built = found.built
    return (str(built.module), str(built.core.file)) if built else ()


def ccl_lines(binding: str) -> Iterator[tuple[str, str]]:
    """Yield what ranks would load for the backend ccl, and why, as (label, text)."""
    from cpulaunch.ccl import bindings
    from cpulaunch.ccl.installed import describe, state

    found = state()
    yield from describe(found, binding)
    if binding == "oneccl_bind_pt" and found.bindings_fit and (problem := bindings.loading_problem()):
        yield "but", f"oneccl_bind_pt does not load, so the ranks will fail: {problem}"
