"""A place on a host that nobody had looked at when the plan was made: from its own topology and libraries."""

from __future__ import annotations

from collections.abc import Mapping

from cpulaunch.discovery.libraries import find_libraries, import_directories, library_directories
from cpulaunch.discovery.this_host import topology_here
from cpulaunch.plan.binding import BindingRequest, bind
from cpulaunch.plan.environment import (
    AFFINITY,
    BINDS_THREADS,
    LIBRARY_VARIABLES,
    choose_libraries,
    memory_policy,
    places_environment,
    threads_environment,
    workers_environment,
)
from cpulaunch.plan.placement import Layout, Place, Placement


def bind_here(
    placement: Placement, layout: Layout, local_rank: int, users: Mapping[str, str]
) -> tuple[Layout, Place]:
    """The assumed ``layout`` with this host's own variables, and the place of a local rank.

    ``users`` are the variables that the user has set.  Raises PlanError where this host can't do it.
    """
    topology = topology_here()
    request = BindingRequest.from_json({**placement.binding, "ranks": len(layout.places)})
    binding = bind(topology, request)
    found = find_libraries(library_directories(), import_directories())
    libraries = choose_libraries(found, **placement.libraries, users=users)
    shared = {k: v for k, v in layout.env.items() if k not in LIBRARY_VARIABLES} | dict(libraries.env)
    if AFFINITY in layout.env:  # else there are no workers, or the user has placed them
        shared.update(workers_environment(binding))
    seat = binding.seats[local_rank]
    env = threads_environment(seat)
    if not any(name in users for name in BINDS_THREADS):
        env.update(places_environment(seat, libraries.intel_openmp))
    policy = memory_policy(seat, topology, request.bind_numa)
    place = Place(str(seat.cores), str(seat.comm_cores), str(seat.numa_nodes), seat.threads, policy, env)
    return Layout(layout.assumed, shared, layout.places), place
