"""Plans one host from its facts.

The planner calls ``plan_host`` for every host.  If it had to assume the facts of a host, the host's agents
call ``plan_host`` again with the facts that they find.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cpulaunch.model.facts import HostFacts
from cpulaunch.plan.binding import Binding
from cpulaunch.plan.environment import (
    AFFINITY,
    BINDS_THREADS,
    THREADS,
    Libraries,
    choose_libraries,
    memory_policy,
    places_environment,
)
from cpulaunch.plan.malloc import GLIBC, demand_glibc, why_untuned
from cpulaunch.plan.placement import HostPlan, RankPlan
from cpulaunch.plan.request import HostRequest


@dataclass(frozen=True)
class HostInput:
    """What `plan_host` needs to know about a host."""

    name: str
    facts: HostFacts
    binding: Binding
    assumed: bool = False  # facts are those of another host
    user_env: Mapping[str, str] = field(default_factory=dict)  # the user's variables for the ranks
    env: Mapping[str, str] = field(default_factory=dict)  # variables for the host's network


def plan_host(host: HostInput, request: HostRequest) -> HostPlan:
    """Return the plan of ``host``.  Raises PlanError if the host lacks a requested library.

    The plan leaves the user's variables as they are.
    """
    binding = host.binding
    libraries = _libraries(host, len(binding.ranks), request)
    affinity = ",".join(map(str, binding.worker_affinity))
    workers = {AFFINITY: affinity} if affinity and AFFINITY not in host.user_env else {}
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
        env={THREADS: str(rank.threads), **places},
    )
