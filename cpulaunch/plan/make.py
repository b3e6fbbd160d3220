"""Config and facts → plan.

``make_plan`` is pure: it looks at nothing but its arguments, and the same arguments give the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cpulaunch.config.config import Config
from cpulaunch.config.rank_settings import rank_settings
from cpulaunch.config.settings import SETTINGS
from cpulaunch.discovery.fabrics import common_provider
from cpulaunch.discovery.libraries import FILES
from cpulaunch.errors import ConfigError, CpulaunchError, PlanError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.facts import Facts, HostFacts
from cpulaunch.model.hosts import Host
from cpulaunch.model.topology import Topology
from cpulaunch.plan.binding import Binding, BindingRequest, bind
from cpulaunch.plan.communication import Situation, communication_defaults
from cpulaunch.plan.environment import (
    BINDS_THREADS,
    PRELOAD,
    Libraries,
    brings,
    choose_libraries,
    common,
    memory_policy,
    places_environment,
    threads_environment,
    to_forward,
    workers_environment,
)
from cpulaunch.plan.plan import LOCALHOST, HostPlan, Plan, Program, RankPlan
from cpulaunch.plan.select import (
    checked_forward,
    chosen_hosts,
    chosen_launcher,
    chosen_master_addr,
    chosen_mpi,
)
from cpulaunch.plan.training import chosen_backend, chosen_precision

_TO_MPI = ("I_MPI_HYDRA_", "HYDRA_", "PRTE_MCA_")


def make_plan(config: Config, facts: Facts, program: Program) -> Plan:
    """The plan for ``program``.  Raises PlanError or ConfigError where the request can't be fulfilled."""
    hosts = chosen_hosts(config, facts)
    launcher = chosen_launcher(config, facts, hosts)
    starter, mpiexec = ("local", "") if launcher == "local" else chosen_mpi(config, facts)
    notes: list[str] = []
    backend = chosen_backend(config, facts, notes)
    bound, request = _bindings(config, facts, hosts, backend)
    for name, binding, assumed in bound:
        notes += [f"{name}{' (assumed)' if assumed else ''}: {note}" for note in binding.notes]
    master_addr = chosen_master_addr(config, facts, launcher, hosts)

    private = tuple(sorted(config["env"]))
    asked = _asked_libraries(config)
    looked = [_looked_at(facts, host) for host in hosts]
    there = {host.name: found for host, (found, _) in zip(hosts, looked, strict=True)}
    precision = chosen_precision(config, there, notes)
    provider = _provider(config, backend, hosts, looked, notes)
    ways = [_way(config, there, provider, several=len(hosts) > 1) for there, _ in looked]
    libraries = _libraries(config, looked, [host.name for host in hosts], asked, notes)
    shared, host_plans = _seat_all(config, bound, looked, libraries, starter, backend, provider, ways, notes)
    env = {
        **shared,
        **rank_settings(config, {"training.backend": backend, "training.precision": precision}),
        **config["env"],
        "MASTER_ADDR": master_addr,
    }
    elsewhere = any(host.name != LOCALHOST and not facts.is_here(host.name) for host in hosts)
    forward = [
        *checked_forward(config),
        *(to_forward(config.environ) if starter == "openmpi" and elsewhere else ()),
    ]
    world_size = sum(len(host.ranks) for host in host_plans)
    if config["hosts.nproc"] not in ("auto", world_size):
        said = f"{config.where('hosts.nproc')}: {config['hosts.nproc']} ranks"
        raise PlanError(
            f"{said}, but slots and topologies make {world_size}",
            hint="give every host its slots, or say -ppn N",
        )
    found: dict[str, Any] = {
        "launcher": launcher,
        "hosts.nnodes": len(hosts),
        "hosts.nproc": world_size,
        "hosts.nproc_per_node": _one_or_list([len(host.ranks) for host in host_plans]),
        "hosts.master_addr": master_addr,
        "ccl.provider": provider or config["ccl.provider"],
        "ccl.worker_count": config["ccl.worker_count"]
        and max(1, max(binding.worker_count for _, binding, _ in bound)),
        "cpu.threads": _one_or_list([rank.threads for host in host_plans for rank in host.ranks]),
        "training.backend": backend,
        "training.precision": precision,
    }
    for what in asked:
        names = {getattr(each, what) for each in libraries}
        known = all(host_facts.libraries is not None for host_facts, _ in looked)
        if known and len(names) == 1 and names <= {"default", *FILES}:
            found[f"cpu.{what}"] = names.pop()
    if launcher == "mpirun":
        found.update({"mpi.flavour": starter, "mpi.path": mpiexec})
    return Plan(
        launcher=launcher,
        starter=starter,
        world_size=world_size,
        master_addr=master_addr,
        hosts=host_plans,
        env=dict(sorted(env.items())),
        private=private,
        forward=tuple(name for name in dict.fromkeys(forward) if name not in env),
        program=program,
        mpiexec=mpiexec,
        mpi_args=config["mpi.args"],
        binding=request.to_json(),
        libraries=asked,
        settings=_settings(config, found),
        notes=tuple(dict.fromkeys(notes)),
        way_out=facts.way_out,
        said_to_mpi=tuple(sorted(n for n in config.environ if n.startswith(_TO_MPI))),
    )


# ---- who sits where


def ranks_per_host(config: Config, hosts: Sequence[Host]) -> list[int | None]:
    """Ranks for each host; None where its topology decides.  PlanError where the numbers don't agree."""
    ppn, total = config["hosts.nproc_per_node"], config["hosts.nproc"]
    if ppn != "auto":
        counts: list[int | None] = [ppn] * len(hosts)
    elif any(host.slots for host in hosts):
        counts = [host.slots for host in hosts]
    elif total != "auto":
        if total % len(hosts):
            where = config.where("hosts.nproc")
            raise PlanError(
                f"{where}: {total} ranks can't be divided evenly over {len(hosts)} hosts",
                hint="say who gets how many: slots=N in the hostfile, or -ppn N",
            )
        return [total // len(hosts)] * len(hosts)
    else:
        return [None] * len(hosts)
    known = sum(count or 0 for count in counts)
    if total != "auto" and None not in counts and known != total:
        source = config.where("hosts.nproc_per_node") if ppn != "auto" else "the hosts' slots"
        raise PlanError(
            f"{config.where('hosts.nproc')}: {total} ranks, but {source} make {known} on {_count(hosts)}",
            hint="give one of the two, or make them agree",
        )
    return counts


def _bindings(
    config: Config, facts: Facts, hosts: tuple[Host, ...], backend: str
) -> tuple[list[tuple[str, Binding, bool]], BindingRequest]:
    """Each host's name, binding, and whether it is assumed; and the request that all were bound by."""
    counts = ranks_per_host(config, hosts)
    looked = [_looked_at(facts, host) for host in hosts]
    request = _request(config, backend)

    def bind_all(request: BindingRequest) -> list[Binding]:
        done: dict[tuple[Topology, int | None], Binding] = {}
        bindings = []
        for host, (host_facts, assumed), count in zip(hosts, looked, counts, strict=True):
            key = (host_facts.topology, count)
            if key not in done:
                like = facts.like_what if assumed else None
                done[key] = _bind(host.name, host_facts, like, replace(request, ranks=count))
            bindings.append(done[key])
        return bindings

    bindings = bind_all(request)
    if len({(b.worker_count, bool(b.worker_affinity)) for b in bindings}) > 1:
        # oneCCL wants one number of workers on all ranks: the one that suits the smallest.
        workers = min(b.worker_count for b in bindings)
        dedicate = all(b.worker_affinity for b in bindings)
        request = replace(request, worker_count=workers, dedicate_workers=dedicate)
        bindings = bind_all(request)
    # Agents that bind anew must not come to another number.
    request = replace(
        request,
        worker_count=max(1, bindings[0].worker_count),
        dedicate_workers=bool(bindings[0].worker_affinity),
    )
    names = [host.name for host in hosts]
    return list(zip(names, bindings, [assumed for _, assumed in looked], strict=True)), request


def _looked_at(facts: Facts, host: Host) -> tuple[HostFacts, bool]:
    """The facts of ``host``, and whether they are only assumed."""
    return facts.of(host.name) if facts.listed else (facts.like, False)


def _request(config: Config, backend: str) -> BindingRequest:
    def cores(key: str) -> CoreSet | None:
        try:
            return None if config[key] == "auto" else CoreSet.parse(config[key])
        except ConfigError as e:
            raise ConfigError(f"{config.where(key)}: {e}", hint=e.hint, part=e.part) from None

    return BindingRequest(
        cores_per_rank=config["cpu.cores_per_rank"],
        cores=cores("cpu.cores"),
        numa_nodes=cores("cpu.numa_nodes"),
        bind_numa=config["cpu.bind_numa"],
        logical_cores=config["cpu.logical_cores"],
        e_cores=config["cpu.e_cores"],
        strategy=config["cpu.strategy"],
        worker_count=config["ccl.worker_count"],
        ccl_logical_cores=config["ccl.logical_cores"],
        dedicate_workers=backend == "ccl",
        oversubscribe=config["hosts.oversubscribe"],
        threads=config["cpu.threads"],
    )


def _bind(name: str, facts: HostFacts, like: str | None, request: BindingRequest) -> Binding:
    try:
        return bind(facts.topology, request)
    except CpulaunchError as e:
        place = "" if name == LOCALHOST else f"{name}{f', taken to be like {like}' if like else ''}: "
        hint = e.hint
        if like:
            hint = f"{hint or ''} Hosts are described by --facts or --lscpu.".strip()
        raise PlanError(f"{place}{e}", hint=hint) from None


def _seat_all(
    config: Config,
    bound: list[tuple[str, Binding, bool]],
    looked: list[tuple[HostFacts, bool]],
    libraries: list[Libraries],
    starter: str,
    backend: str,
    provider: str | None,
    ways: list[Way],
    notes: list[str],
) -> tuple[dict[str, str], tuple[HostPlan, ...]]:
    """The variables that all ranks share, and the hosts with those that they don't."""
    bindings = [binding for _, binding, _ in bound]
    wired = {way: _communication(config, bindings, starter, backend, provider, way) for way in set(ways)}
    ours = common(wired.values())
    threads = common(threads_environment(seat) for _, binding, _ in bound for seat in binding.seats)
    own_threads = not threads
    decided = [name for key, name in _FIELD_VARIABLES if config.is_set(key)]
    users = {k: v for k, v in config.environ.items() if k not in decided}
    # What the user set for one of ours is in the plan, too: with the user's value.
    shared = {name: users.get(name, value) for name, value in {**ours, **threads}.items()}
    theirs = {*users, *config["env"]}
    binders = [name for name in BINDS_THREADS if name in theirs]
    if binders:
        notes.append(f"OpenMP's threads are bound by your {', '.join(binders)}, not by us")

    hosts, first = [], 0
    for (name, binding, assumed), (host_facts, _), chosen, way in zip(
        bound, looked, libraries, ways, strict=True
    ):
        ranks = tuple(
            RankPlan(
                first + seat.local_rank,
                seat.local_rank,
                str(seat.cores),
                str(seat.comm_cores),
                str(seat.numa_nodes),
                seat.threads,
                memory_policy(seat, host_facts.topology, config["cpu.bind_numa"]),
                {
                    **(threads_environment(seat) if own_threads else {}),
                    **({} if binders else places_environment(seat, chosen.intel_openmp)),
                },
            )
            for seat in binding.seats
        )
        own = {**wired[way], **workers_environment(binding)}
        own = {k: v for k, v in own.items() if k not in ours and k not in theirs}
        own.update(chosen.env)
        hosts.append(HostPlan(name, assumed, own, ranks))
        first += len(ranks)
    return shared, tuple(hosts)


def _asked_libraries(config: Config) -> dict[str, str]:
    """The allocator and the OpenMP runtime asked for.

    The environment is stronger than a file: an allocator in LD_PRELOAD stands in for the file's.
    """
    preloaded = _users_variables(config).get(PRELOAD, "").replace(":", " ").split()
    asked = {}
    for what in ("allocator", "openmp"):
        weak = not config.origins[f"cpu.{what}"].startswith(("-", "$"))
        asked[what] = "auto" if weak and brings(what, preloaded) else config[f"cpu.{what}"]
    return asked


def _libraries(
    config: Config,
    looked: list[tuple[HostFacts, bool]],
    names: list[str],
    asked: Mapping[str, str],
    notes: list[str],
) -> list[Libraries]:
    """What each host's ranks are started with."""
    users = _users_variables(config)
    libraries = []
    for name, (facts, assumed) in zip(names, looked, strict=True):
        found = facts.libraries
        if assumed and found is not None and not {"auto", "default", *found}.issuperset(asked.values()):
            found = None  # it may be there all the same: its agents will see
        try:
            chosen = choose_libraries(found, **asked, users=users)
        except PlanError as e:
            raise PlanError(str(e) if name == LOCALHOST else f"{name}: {e}", hint=e.hint) from None
        notes += chosen.notes
        libraries.append(chosen)
    return libraries


def _users_variables(config: Config) -> dict[str, str]:
    return {**config.environ, **config["env"]}


# The settings whose variable of the field a stronger source may overrule.
_FIELD_VARIABLES = [(setting.key, setting.variable) for setting in SETTINGS.values() if setting.variable]


class Way(NamedTuple):
    """A host's network interfaces, where known: to the other hosts, and of the provider's card."""

    interface: str | None
    card: str | None


def _provider(
    config: Config,
    backend: str,
    hosts: Sequence[Host],
    looked: list[tuple[HostFacts, bool]],
    notes: list[str],
) -> str | None:
    """libfabric's provider: the one that was said, else that of a card which works on all hosts."""
    said: str = config["ccl.provider"]
    if said != "auto":
        return said
    if len(hosts) == 1 or config["ccl.transport"] != "ofi":
        return None
    found = {
        host.name: None if assumed else facts.fabrics
        for host, (facts, assumed) in zip(hosts, looked, strict=True)
    }
    provider, complaints = common_provider(found)
    if backend != "gloo":
        notes += [f"{host}: {complaint}" for host, complaint in complaints.items()]
    elif provider:
        notes.append(f"gloo uses TCP only: the hosts' cards for {provider} stay unused")
    return provider


def _way(config: Config, there: HostFacts, provider: str | None, several: bool) -> Way:
    said = config["ccl.interface"]
    found = there.interface if several else None
    cards = (card for card in there.fabrics or () if card.provider == provider and not card.unusable)
    card = next((card.interface for card in cards), "")
    return Way(found if said == "auto" else said, card or None)


def _communication(
    config: Config,
    bindings: list[Binding],
    starter: str,
    backend: str,
    provider: str | None,
    way: Way,
) -> dict[str, str]:
    """One set of variables for all ranks, as collectives want it: that of the narrowest host."""
    seats = [seat for binding in bindings for seat in binding.seats]
    return communication_defaults(
        Situation(
            backend=backend,
            starter=starter,
            hosts=len(bindings),
            local_ranks=max(len(binding.seats) for binding in bindings),
            cores=min(len(seat.cores) for seat in seats),
            comm_cores=min(len(seat.comm_cores) for seat in seats),
            worker_count=max(1, bindings[0].worker_count),
            oversubscribed=any(binding.oversubscribed for binding in bindings),
            transport=config["ccl.transport"],
            provider=provider,
            interface=way.interface,
            card=way.card,
        )
    )


# ---- what it all came to


def _settings(config: Config, found: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    rows = []
    for key, value in config.values.items():
        origin = config.origins[key]
        if key in found and found[key] != value:
            value, origin = found[key], "detected"
        rows.append(
            {"key": key, "value": list(value) if isinstance(value, tuple) else value, "origin": origin}
        )
    return tuple(rows)


def _one_or_list(numbers: list[int]) -> int | list[int]:
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _count(hosts: Sequence[Host]) -> str:
    return f"{len(hosts)} host{'s' if len(hosts) != 1 else ''}"
