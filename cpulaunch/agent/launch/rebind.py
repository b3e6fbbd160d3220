"""Plan cores and network interface on the host itself.  The agents of assumed hosts do this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpulaunch.discovery.host.cgroup import memory_limit
from cpulaunch.discovery.host.files import read_file
from cpulaunch.discovery.host.interfaces import interfaces_here, route_to
from cpulaunch.discovery.host.libraries import find_libraries, import_directories, library_directories
from cpulaunch.discovery.host.this_host import libc_here, topology_here
from cpulaunch.model.facts import HostFacts
from cpulaunch.model.network import interface_to_master
from cpulaunch.plan.binding import bind
from cpulaunch.plan.communication import interface_variables
from cpulaunch.plan.environment import AFFINITY, LEFT_OUT, LIBRARY_VARIABLES
from cpulaunch.plan.host import HostInput, plan_host
from cpulaunch.plan.placement import HostPlan
from cpulaunch.plan.request import HostRequest


def facts_of_this_host() -> HostFacts:
    """Collect the facts of this host that `rebind_on_host` needs."""
    libraries = find_libraries(library_directories(), import_directories())
    return HostFacts(
        topology_here(), libraries=libraries, libc=libc_here(), memory_limit=memory_limit(read_file)
    )


def rebind_on_host(
    assumed: HostPlan, facts: HostFacts, request: Mapping[str, Any], user_env: Mapping[str, str]
) -> HostPlan:
    """Plan the host again with its actual ``facts``.

    ``assumed`` is the planner's plan, ``request`` is the placement's, and ``user_env`` holds the variables
    that the user has set.  The new plan has notes only about libraries that are left out.  Raises PlanError
    if this host can't fulfil the request.
    """
    replaced = (AFFINITY, *LIBRARY_VARIABLES)
    asked = HostRequest.from_json(request)
    host = HostInput(
        assumed.host,
        facts,
        bind(facts.topology, replace(asked.binding, ranks=len(assumed.ranks))),
        user_env=user_env,
        env={name: value for name, value in assumed.env.items() if name not in replaced},
    )
    planned = plan_host(host, asked)
    return planned._replace(notes=tuple(note for note in planned.notes if LEFT_OUT in note))


def select_interface(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that name this host's interface to the master; empty if the interface is not known.

    ``env`` is the rank's environment so far.  On the master itself, its name may resolve to loopback, so the
    only interface to other hosts is used.
    """
    interfaces = interfaces_here()
    addresses, source = route_to(env["MASTER_ADDR"])
    found = interface_to_master(interfaces, source, addresses)
    if found is None:
        elsewhere = {each.name: each for each in interfaces if each.leads_elsewhere}
        if len(elsewhere) != 1:
            return {}
        (found,) = elsewhere.values()
    return interface_variables(found.name, env.get("FI_PROVIDER"))
