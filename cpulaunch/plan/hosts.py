"""Binds and plans the hosts of a job."""

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
    """Return the settings that apply to each host.  ``workers``: ranks set cores aside for communication."""
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

    A library in the user's LD_PRELOAD is stronger than a setting in a file.
    """
    preloaded = user_environment(config).get(PRELOAD, "").replace(":", " ").split()
    from_file = config.origin(setting).source < Source.ENVIRONMENT
    return "auto" if from_file and library_among(setting.name, preloaded) else wanted


def bind_hosts(
    config: Config, facts: Facts, hosts: Sequence[Host], request: HostRequest
) -> tuple[list[HostInput], HostRequest]:
    """Return each host with its ranks' CPUs, and ``request`` with the number of workers that was chosen.

    Agents that bind a host with the returned request get the same number of workers.
    """
    counts, user_env = ranks_per_host(config, hosts), user_environment(config)

    def bound(host: str, known: HostFacts, assumed: bool, binding: BindingRequest) -> Binding:
        binding = replace(binding, ranks=counts[host])
        return _bind(host, known.topology, binding, facts.like_what if assumed else "")

    inputs = []
    for name in (host.name for host in hosts):
        known, assumed = _known(facts, name, request)
        binding = bound(name, known, assumed, request.binding)
        inputs.append(HostInput(name, known, binding, assumed, user_env=user_env))
    bindings = [each.binding for each in inputs]
    if len({(each.worker_count, bool(each.worker_affinity)) for each in bindings}) > 1:
        # oneCCL needs the same number of workers in all ranks.
        workers = min(each.worker_count for each in bindings)
        dedicate = all(each.worker_affinity for each in bindings)
        same = replace(request.binding, worker_count=workers, dedicate_workers=dedicate)
        inputs = [replace(each, binding=bound(each.name, each.facts, each.assumed, same)) for each in inputs]
    first = inputs[0].binding
    settled = replace(
        request.binding,
        worker_count=max(1, first.worker_count),
        dedicate_workers=bool(first.worker_affinity),
    )
    return inputs, replace(request, binding=settled)


def _known(facts: Facts, name: str, request: HostRequest) -> tuple[HostFacts, bool]:
    """Return the facts of the host ``name``, and whether they are those of another host."""
    known, assumed = facts.of(name) if facts.listed else (facts.like, False)
    requested = {request.allocator, request.openmp} - {"auto", "default", GLIBC}
    if assumed and not requested <= set(known.libraries or ()):
        # The other host lacks the libraries, but this one may have them.  Its agents will look.
        known = replace(known, libraries=None)
    return known, assumed


def _bind(host: str, topology: Topology, request: BindingRequest, like: str) -> Binding:
    """Bind a host's ranks.  ``like`` is the host whose topology is assumed; empty if its own is known."""
    try:
        return bind(topology, request)
    except CpulaunchError as e:
        taken = f", assumed to match {like}" if like else ""
        place = "" if host == LOCALHOST else f"{host}{taken}: "
        hint = e.hint
        if like:
            hint = f"{hint or ''} --facts and --lscpu describe hosts.".strip()
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
