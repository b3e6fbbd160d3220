"""The network interface of a host whose interfaces were unknown when the plan was made."""

from __future__ import annotations

from collections.abc import Mapping

from cpulaunch.discovery.host.interfaces import interfaces_here, route_to
from cpulaunch.model.network import interface_to_master
from cpulaunch.plan.communication import interface_variables


def select_interface(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that name this host's interface to the master; none where it is not known which that is.

    ``env`` is the rank's environment so far.
    """
    interfaces = interfaces_here()
    addresses, source = route_to(env["MASTER_ADDR"])
    found = interface_to_master(interfaces, source, addresses)
    if found is None:  # the master itself, where its own name may lead to loopback
        elsewhere = {each.name: each for each in interfaces if each.leads_elsewhere}
        if len(elsewhere) != 1:
            return {}
        (found,) = elsewhere.values()
    return interface_variables(found.name, env.get("FI_PROVIDER"))
