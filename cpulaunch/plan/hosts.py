"""The hosts of a job as the planner knows them, and the request for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cpulaunch.config.config import Config
from cpulaunch.config.origin import Source
from cpulaunch.config.setting import Setting
from cpulaunch.errors import CpulaunchError, PlanError
from cpulaunch.model.facts import Facts, HostFacts
from cpulaunch.model.hosts import LOCALHOST, Host
from cpulaunch.model.topology import Topology
from cpulaunch.plan.binding import Binding, bind
from cpulaunch.plan.environment import PRELOAD, library_among
from cpulaunch.plan.host import HostInput, plan_host
from cpulaunch.plan.instances import are_wanted
from cpulaunch.plan.malloc import GLIBC
from cpulaunch.plan.placement import HostPlan
from cpulaunch.plan.request import BindingRequest, HostRequest
from cpulaunch.plan.select import ranks_per_host


def user_environment(config: Config) -> dict[str, str]:
    """Return the variables that the user has set for the ranks."""
    return {**config.environ, **config.env}


def host_request(config: Config, *, workers: bool) -> HostRequest:
    """Return the request that the settings make of every host; ``workers``: ranks have comm cores."""
    cpu = config.cpu
    binding = BindingRequest(
        cores_per_rank=cpu.cores_per_rank,
        cores=None if cpu.cores == "auto" else cpu.cores,
        numa_nodes=None if cpu.numa_nodes == "auto" else cpu.numa_nodes,
        bind_numa=cpu.bind_numa,
        logical_cores=cpu.logical_cores,
        e_cores=cpu.e_cores,
        strategy=cpu.strategy,
        worker_count=config.ccl.worker_count,
        ccl_logical_cores=config.ccl.logical_cores,
        dedicate_workers=workers,
        oversubscribe=config.hosts.oversubscribe,
        threads=cpu.threads,
        instances=are_wanted(config),
    )
    allocator = _library(config, Config.cpu.allocator, cpu.allocator)
    return HostRequest(binding, allocator, _library(config, Config.cpu.openmp, cpu.openmp))


def _library(config: Config, setting: Setting[Any], wanted: str) -> str:
    """Return the requested allocator or OpenMP runtime.

    The environment is stronger than a file: an allocator in LD_PRELOAD replaces the file's.
    """
    preloaded = user_environment(config).get(PRELOAD, "").replace(":", " ").split()
    weak = config.origin(setting).source < Source.ENVIRONMENT
    return "auto" if weak and library_among(setting.name, preloaded) else wanted


def bind_hosts(
    config: Config, facts: Facts, hosts: Sequence[Host], request: HostRequest
) -> tuple[list[HostInput], HostRequest]:
    """Return the input for each of ``hosts``, with its ranks' CPUs; and the settled request.

    With that request, the hosts' agents get the same result.
    """
    counts, user_env = ranks_per_host(config, hosts), user_environment(config)

    def bound(host: str, known: HostFacts, assumed: bool, asked: BindingRequest) -> Binding:
        asked = replace(asked, ranks=counts[host])
        return _bind(host, known.topology, asked, facts.like_what if assumed else "")

    inputs = []
    for name in (host.name for host in hosts):
        known, assumed = _known(facts, name, request)
        binding = bound(name, known, assumed, request.binding)
        inputs.append(HostInput(name, known, binding, assumed, user_env=user_env))
    bindings = [each.binding for each in inputs]
    if len({(each.worker_count, bool(each.worker_affinity)) for each in bindings}) > 1:
        # oneCCL needs the same number of workers on all ranks, so take the smallest.
        workers = min(each.worker_count for each in bindings)
        dedicate = all(each.worker_affinity for each in bindings)
        asked = replace(request.binding, worker_count=workers, dedicate_workers=dedicate)
        inputs = [replace(each, binding=bound(each.name, each.facts, each.assumed, asked)) for each in inputs]
    # Agents that bind anew must get the same number.
    first = inputs[0].binding
    settled = replace(
        request.binding,
        worker_count=max(1, first.worker_count),
        dedicate_workers=bool(first.worker_affinity),
    )
    return inputs, replace(request, binding=settled)


def _known(facts: Facts, name: str, request: HostRequest) -> tuple[HostFacts, bool]:
    """Return the reliable facts of the host ``name``, and whether they are only assumed."""
    known, assumed = facts.of(name) if facts.listed else (facts.like, False)
    asked = {request.allocator, request.openmp} - {"auto", "default", GLIBC}
    if assumed and not asked <= set(known.libraries or ()):
        # The host may have the libraries: its agents will look.
        known = replace(known, libraries=None)
    return known, assumed


def _bind(host: str, topology: Topology, request: BindingRequest, like: str) -> Binding:
    """Bind ranks.  ``like`` names what an assumed host is assumed to match; empty for a known one."""
    try:
        return bind(topology, request)
    except CpulaunchError as e:
        taken = f", assumed to match {like}" if like else ""
        place = "" if host == LOCALHOST else f"{host}{taken}: "
        hint = e.hint
        if like:
            hint = f"{hint or ''} Hosts are described by --facts or --lscpu.".strip()
        raise PlanError(f"{place}{e}", hint=hint) from None


def plan_hosts(hosts: Sequence[HostInput], request: HostRequest) -> tuple[HostPlan, ...]:
    """Return the plan of each host."""
    planned: list[HostPlan] = []
    for host in hosts:
        try:
            planned.append(plan_host(host, request))
        except PlanError as e:
            raise PlanError(str(e) if host.name == LOCALHOST else f"{host.name}: {e}", hint=e.hint) from None
    return tuple(planned)
