"""The hosts of a job as the planner knows them, and what it asks of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cpulaunch.config.config import Config
from cpulaunch.config.origin import Source
from cpulaunch.config.setting import Setting
from cpulaunch.errors import CpulaunchError, PlanError
from cpulaunch.model.facts import Facts
from cpulaunch.model.hosts import LOCALHOST, Host
from cpulaunch.plan.binding import Binding, bind
from cpulaunch.plan.environment import PRELOAD, library_among
from cpulaunch.plan.host import HostInput, plan_host
from cpulaunch.plan.instances import are_wanted
from cpulaunch.plan.malloc import GLIBC
from cpulaunch.plan.plan import HostPlan
from cpulaunch.plan.request import BindingRequest, HostRequest
from cpulaunch.plan.select import ranks_per_host


class BoundHost(NamedTuple):
    """A host and its ranks' CPUs, before it is known what all hosts together need."""

    input: HostInput
    binding: Binding


def user_environment(config: Config) -> dict[str, str]:
    """The variables that the user has set for the ranks."""
    return {**config.environ, **config.env}


def host_request(config: Config, backend: str) -> HostRequest:
    """What the settings ask of every host."""
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
        dedicate_workers=backend == "ccl",
        oversubscribe=config.hosts.oversubscribe,
        threads=cpu.threads,
        instances=are_wanted(config),
    )
    allocator = _library(config, Config.cpu.allocator, cpu.allocator)
    return HostRequest(binding, allocator, _library(config, Config.cpu.openmp, cpu.openmp))


def _library(config: Config, setting: Setting[Any], wanted: str) -> str:
    """The allocator, or the OpenMP runtime, that is asked for.

    The environment is stronger than a file: an allocator in LD_PRELOAD stands in for the file's.
    """
    preloaded = user_environment(config).get(PRELOAD, "").replace(":", " ").split()
    weak = config.origin(setting).source < Source.ENVIRONMENT
    return "auto" if weak and library_among(setting.name, preloaded) else wanted


def host_inputs(
    config: Config, facts: Facts, hosts: Sequence[Host], request: HostRequest
) -> tuple[HostInput, ...]:
    """What is known of each of ``hosts``."""
    counts, user_env = ranks_per_host(config, hosts), user_environment(config)
    inputs = []
    for host in hosts:
        known, assumed = facts.of(host.name) if facts.listed else (facts.like, False)
        asked = {request.allocator, request.openmp} - {"auto", "default", GLIBC}
        if assumed and not asked <= set(known.libraries or ()):
            # They may be there all the same: the host's agents will look.
            known = replace(known, libraries=None)
        inputs.append(HostInput(host.name, known, assumed, counts[host.name], user_env=user_env))
    return tuple(inputs)


def bind_hosts(
    hosts: Sequence[HostInput], request: HostRequest, like: str
) -> tuple[list[BoundHost], HostRequest]:
    """The CPUs of all ranks, and the request by which the hosts' agents will come to the same.

    ``like`` is what assumed hosts are assumed to match, in words for errors.
    """
    bound = [BoundHost(host, _bind(host, request.binding, like)) for host in hosts]
    if len({(b.binding.worker_count, bool(b.binding.worker_affinity)) for b in bound}) > 1:
        # oneCCL wants one number of workers on all ranks: the one that suits the smallest.
        workers = min(b.binding.worker_count for b in bound)
        dedicate = all(b.binding.worker_affinity for b in bound)
        binding = replace(request.binding, worker_count=workers, dedicate_workers=dedicate)
        bound = [BoundHost(host, _bind(host, binding, like)) for host in hosts]
    # Agents that bind anew must not come to another number.
    first = bound[0].binding
    settled = replace(
        request.binding,
        worker_count=max(1, first.worker_count),
        dedicate_workers=bool(first.worker_affinity),
    )
    return bound, replace(request, binding=settled)


def _bind(host: HostInput, request: BindingRequest, like: str) -> Binding:
    try:
        return bind(host.facts.topology, replace(request, ranks=host.ranks))
    except CpulaunchError as e:
        taken = f", assumed to match {like}" if host.assumed else ""
        place = "" if host.name == LOCALHOST else f"{host.name}{taken}: "
        hint = e.hint
        if host.assumed:
            hint = f"{hint or ''} Hosts are described by --facts or --lscpu.".strip()
        raise PlanError(f"{place}{e}", hint=hint) from None


def plan_hosts(hosts: Sequence[HostInput], request: HostRequest) -> tuple[HostPlan, ...]:
    """The plan of each host; ranks are numbered in the hosts' order."""
    planned: list[HostPlan] = []
    first_rank = 0
    for host in hosts:
        try:
            planned.append(plan_host(replace(host, first_rank=first_rank), request))
        except PlanError as e:
            raise PlanError(str(e) if host.name == LOCALHOST else f"{host.name}: {e}", hint=e.hint) from None
        first_rank += len(planned[-1].ranks)
    return tuple(planned)
