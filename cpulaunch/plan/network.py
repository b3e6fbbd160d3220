"""Plans communication: the transport, libfabric's provider, network interfaces, and oneCCL's variables."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from cpulaunch.config.config import Config
from cpulaunch.errors import ConfigError, PlanError
from cpulaunch.launchers.base import Launcher
from cpulaunch.model.fabrics import common_provider
from cpulaunch.model.facts import Facts, HostFacts
from cpulaunch.model.hosts import Host
from cpulaunch.plan.communication import (
    Situation,
    communication_defaults,
    decide_transport,
    needs_oneccl,
)
from cpulaunch.plan.environment import AFFINITY, common
from cpulaunch.plan.host import HostInput
from cpulaunch.plan.hosts import user_environment
from cpulaunch.plan.instances import NO_BACKEND
from cpulaunch.wording import counted


class Provider(NamedTuple):
    """libfabric's provider, and notes about unused cards."""

    name: str | None  # None: libfabric's default
    notes: tuple[str, ...] = ()


def check_ports(config: Config, backend: str, ranks: Sequence[int]) -> str:
    """Return a note about ``--port-range``; empty if none is needed.  ``ranks``: their number on each host.

    Raises ConfigError or PlanError if the job would listen on a port outside the range, or the range has too
    few ports.
    """
    ports, where = config.hosts.ports, config.where(Config.hosts.port_range)
    if ports is None:
        return ""
    port = config.hosts.master_port
    if port != "auto" and port not in ports:
        raise ConfigError(
            f"{config.where(Config.hosts.master_port)}: port {port} is outside of {where}",
            hint="leave it out: the ranks then meet at a free port of the range",
        )
    if backend == "gloo":
        raise PlanError(
            f"{where}: gloo can't keep its ports within a range",
            hint="use --backend ccl (`cpulaunch ccl build` builds it)",
        )
    if config.ccl.binding == "oneccl_bind_pt":
        raise PlanError(
            f"{where}: oneccl_bind_pt can't keep its ports within a range",
            hint="use --ccl-binding cpulaunch",
        )
    needed = max(ranks[0] + 1, *ranks)  # MASTER_PORT is on the first host
    if len(ranks) > 1 and len(ports) < needed:
        raise PlanError(
            f"{where}: {counted(len(ports), 'port')}, but a host needs at least {needed}",
            hint="docs/clusters.md (Firewalls) lists what listens on each host",
        )
    if config.training.as_written:
        return f"{where}: a gloo group that the script makes listens on any port"
    return ""


def _check_interface_names(config: Config, backend: str, *, several: bool) -> None:
    """Raise PlanError if GLOO_SOCKET_IFNAME is needed and is a pattern or an address, not an interface."""
    text = user_environment(config).get("GLOO_SOCKET_IFNAME", "")
    wrong = [name for name in text.split(",") if name[:1] in "^=" or _is_address(name)]
    if text and wrong and (several or backend == "gloo"):
        raise PlanError(
            f"$GLOO_SOCKET_IFNAME: {text}: {wrong[0] or 'an empty word'} is not the name of an interface",
            hint="unset it, or name one, such as eth0; --interface names one for all communication",
        )


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


class Interfaces(NamedTuple):
    """Names of a host's network interfaces; None if they are unknown."""

    interface: str | None  # towards the other hosts
    card: str | None  # of the provider's card


class Communication(NamedTuple):
    """Variables for collectives."""

    shared: dict[str, str]  # the same on all hosts
    by_interfaces: dict[Interfaces, dict[str, str]]  # all variables of a host with these interfaces

    def of_host(self, interfaces: Interfaces) -> dict[str, str]:
        """Return the variables of a host with these interfaces, without shared variables."""
        return {k: v for k, v in self.by_interfaces[interfaces].items() if k not in self.shared}


def choose_provider(config: Config, backend: str, facts: Facts, hosts: Sequence[Host]) -> Provider:
    """Return the user's provider, else the provider of a card that works on all hosts."""
    if backend == NO_BACKEND:
        return Provider(None)
    chosen = config.ccl.provider
    if chosen != "auto":
        return Provider(chosen)
    if len(hosts) == 1 or config.ccl.transport not in ("auto", "ofi", "oneccl"):
        return Provider(None)
    known = {host.name: facts.of(host.name) if facts.listed else (facts.like, False) for host in hosts}
    provider, complaints = common_provider(
        {name: None if assumed else found.fabrics for name, (found, assumed) in known.items()}
    )
    if backend != "gloo":
        return Provider(provider, tuple(f"{host}: {complaint}" for host, complaint in complaints.items()))
    unused = f"gloo uses TCP only: the hosts' cards for {provider} stay unused"
    return Provider(provider, (unused,) if provider else ())


class Transport(NamedTuple):
    """The transport of ccl's collectives."""

    name: str  # empty if the backend isn't ccl
    note: str = ""  # why it isn't the requested transport


def choose_transport(
    config: Config, backend: str, provider: str | None, *, hosts: int, local_ranks: int, workers: int
) -> Transport:
    """Return `decide_transport` for the whole job; Intel's bindings have only oneCCL's transports."""
    if backend != "ccl":
        return Transport("")
    requested = config.ccl.transport
    if config.ccl.binding == "oneccl_bind_pt":
        name = "mpi" if requested == "mpi" else "oneccl"
        dropped = requested not in ("auto", "ofi", name)
        where = config.where(Config.ccl.transport)
        return Transport(
            name, f"{where}: oneccl_bind_pt has no {requested}; it uses {name}" if dropped else ""
        )
    user_variables = user_environment(config)
    user_variables.pop("CCL_ATL_TRANSPORT", None)  # it is a source of the setting, already merged
    name = decide_transport(
        requested,
        hosts=hosts,
        local_ranks=local_ranks,
        provider=provider,
        worker_count=workers,
        user_variables=user_variables,
    )
    return Transport(name)


def wants_workers(config: Config, backend: str, provider: str | None, hosts: int) -> bool:
    """Return whether ranks set cores aside for communication: on request, or if oneCCL needs workers."""
    if backend != "ccl":
        return False
    if config.ccl.worker_count != "auto" or config.ccl.logical_cores or AFFINITY in user_environment(config):
        return True
    carrier = choose_transport(config, backend, provider, hosts=hosts, local_ranks=1, workers=1)
    return needs_oneccl(carrier.name)


def interfaces_of(config: Config, facts: HostFacts, provider: str | None, *, several: bool) -> Interfaces:
    """Return a host's interfaces.  ``several``: the job has several hosts."""
    chosen = config.ccl.interface
    found = facts.interface if several else None
    cards = (card for card in facts.fabrics or () if card.provider == provider and not card.unusable)
    card = next((card.interface for card in cards), "")
    return Interfaces(found if chosen == "auto" else chosen, card or None)


def plan_communication(
    config: Config,
    bound: Sequence[HostInput],
    launcher: Launcher,
    backend: str,
    provider: str | None,
    transport: str,
) -> Communication:
    """Return the variables for collectives.

    All ranks need the same, so the host with the fewest comm cores determines them.  ``transport`` is the
    name from `choose_transport`.
    """
    several = len(bound) > 1
    _check_interface_names(config, backend, several=several)
    bindings = [each.binding for each in bound]
    ranks = [rank for binding in bindings for rank in binding.ranks]
    situation = Situation(
        backend=backend,
        hosts=len(bound),
        local_ranks=max(len(binding.ranks) for binding in bindings),
        comm_cores=min(len(rank.comm_cores) for rank in ranks),
        worker_count=max(1, bindings[0].worker_count),
        oversubscribed=any(binding.oversubscribed for binding in bindings),
        intel_mpi=launcher.is_intel_mpi,
        transport="mpi" if transport == "mpi" else "ofi",
        provider=provider,
        bindings=config.ccl.binding == "oneccl_bind_pt",
        ports=config.hosts.ports,
    )
    each = {interfaces_of(config, host.facts, provider, several=several) for host in bound}
    by_interfaces = {
        one: communication_defaults(situation._replace(interface=one.interface, card=one.card))
        for one in each
    }
    return Communication(common(by_interfaces.values()), by_interfaces)
