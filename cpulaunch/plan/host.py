"""Plans one host from its facts, in one pure function, ``plan_host``.

The planner calls it for every host, with the facts that it was given.  On a host whose facts were only
assumed, each agent calls it again with the facts that it finds there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cpulaunch.model.facts import HostFacts
from cpulaunch.plan.binding import Binding
from cpulaunch.plan.environment import (
    AFFINITY,
    BINDS_THREADS,
    Libraries,
    choose_libraries,
    memory_policy,
    places_environment,
    threads_environment,
    workers_environment,
)
from cpulaunch.plan.malloc import GLIBC, demand_glibc, why_untuned
from cpulaunch.plan.placement import HostPlan, RankPlan
from cpulaunch.plan.request import HostRequest


@dataclass(frozen=True)
class HostInput:
    """What is known of one host when its plan is made.

    ``assumed``: the facts are those of another host that this one is assumed to match.  ``user_env`` are the
    variables that the user has set for the ranks, ``env`` those that the plan sets for this host's network.
    """

    name: str
    facts: HostFacts
    binding: Binding
    assumed: bool = False
    user_env: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def plan_host(host: HostInput, request: HostRequest) -> HostPlan:
    """Plan ``host``, without variables that the user has set.

    Raises PlanError if the host lacks a requested library.
    """
    binding = host.binding
    libraries = _libraries(host, len(binding.ranks), request)
    workers = {} if AFFINITY in host.user_env else workers_environment(binding)
    return HostPlan(
        host=host.name,
        assumed=host.assumed,
        env={**host.env, **workers, **libraries.env},
        ranks=tuple(_plan_rank(rank, host, libraries, request) for rank in binding.ranks),
        allocator=libraries.allocator,
        why_allocator=libraries.why_allocator,
        openmp=libraries.openmp,
        notes=tuple(libraries.notes),
    )


def _libraries(host: HostInput, ranks: int, request: HostRequest) -> Libraries:
    facts = host.facts
    if request.allocator == GLIBC:
        demand_glibc(facts.libc)
    untuned = why_untuned(facts.libc, facts.memory_limit, ranks)
    return choose_libraries(facts.libraries, request.allocator, request.openmp, host.user_env, untuned)


def _plan_rank(rank: RankPlan, host: HostInput, libraries: Libraries, request: HostRequest) -> RankPlan:
    user_binds_threads = any(name in host.user_env for name in BINDS_THREADS)
    places = {} if user_binds_threads else places_environment(rank, libraries.intel_openmp)
    return rank._replace(
        places=(),
        memory_policy=memory_policy(rank, host.facts.topology, request.binding.bind_numa),
        env={**threads_environment(rank), **places},
    )
