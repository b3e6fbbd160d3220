"""Makes a job's plan from its config and the facts about its hosts.

``make_plan`` is pure: the same arguments give the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cpulaunch import variables
from cpulaunch.config.config import Config, Settings
from cpulaunch.config.rank_settings import rank_settings
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SETTINGS
from cpulaunch.errors import PlanError
from cpulaunch.launchers.base import Launcher
from cpulaunch.model.facts import Facts
from cpulaunch.model.hosts import LOCALHOST, Host, all_here
from cpulaunch.model.libraries import FILES
from cpulaunch.plan.environment import BINDS_THREADS, THREADS, common, foreign_claims
from cpulaunch.plan.host import HostInput
from cpulaunch.plan.hosts import bind_hosts, host_request, plan_hosts, user_environment
from cpulaunch.plan.instances import (
    NO_BACKEND,
    are_wanted,
    as_instances,
    check_lines,
    only_one,
)
from cpulaunch.plan.malloc import GLIBC
from cpulaunch.plan.network import (
    Provider,
    Transport,
    check_ports,
    choose_provider,
    choose_transport,
    interfaces_of,
    plan_communication,
    wants_workers,
)
from cpulaunch.plan.placement import HostPlan
from cpulaunch.plan.plan import Instances, Plan, Program
from cpulaunch.plan.request import HostRequest
from cpulaunch.plan.select import (
    LauncherDecision,
    MasterAddress,
    check_restarts,
    checked_world_size,
    chosen_launcher,
    chosen_master_addr,
    first_hosts,
    forwarded_names,
)
from cpulaunch.plan.training import HostSpeed, PrecisionDecision, decide_backend, decide_precision
from cpulaunch.wording import shortened

# Settings that a variable of the field also sets, such as OMP_NUM_THREADS.
_FIELD_VARIABLES = [(setting, setting.variable) for setting in SETTINGS.values() if setting.variable]


def make_plan(
    config: Config, facts: Facts, program: Program, precision: PrecisionDecision | None = None
) -> Plan:
    """Return the plan for ``program``.  Raises PlanError or ConfigError if the request can't be fulfilled.

    ``precision`` is the precision of the job's first attempt if this plan is for a later attempt.
    """
    check_restarts(config := as_instances(config))
    listed = first_hosts(config, facts.listed or (Host(LOCALHOST),))
    chosen = chosen_launcher(config, facts, listed)
    backend, launcher = decide_backend(config, facts), chosen.launcher
    job = _plan_all(config, facts, listed, launcher, backend.backend)
    precision = precision or decide_precision(config.training.precision, _speeds(job))
    job, listed, instances = _instances(config, program, job, listed)
    hidden = foreign_claims(() if instances else launcher.identity, config.forward)
    warning = "" if config.training.as_written else precision.warning
    master = chosen_master_addr(config, facts, launcher, listed)
    left_out = _user_variables(config, launcher.left_out)
    own = master.note, backend.note, _unused_arguments(config, launcher)
    notes = *own, warning, *job.notes, _hidden_note(config, hidden), _left_out_note(chosen, left_out)
    decided = _decisions(job, precision) | ({} if instances else _rank_decisions(master, backend.backend))
    env = _environment(config, job, decided)
    return Plan(
        launcher_setting=chosen.setting,
        launcher=chosen.name,
        launcher_why=chosen.why,
        world_size=checked_world_size(config, sum(len(host.ranks) for host in job.hosts)),
        master_addr=master.address,
        transport=job.transport.name,
        allocator="; ".join(dict.fromkeys(f"{h.allocator} ({h.why_allocator})" for h in job.hosts)),
        hosts=job.hosts,
        here_alone=all_here(listed, facts.here),
        env=env,
        private=tuple(sorted(config.env)),
        forward=tuple(n for n in forwarded_names(config, facts, launcher, listed) if n not in env),
        hidden=hidden,
        program=program,
        mpiexec=chosen.mpiexec,
        mpi_args=config.mpi.args,
        request=job.request,
        settings=Settings(config.given),
        found={**decided, **_detected(config, chosen, job)},
        notes=tuple(filter(None, dict.fromkeys(notes))),
        egress_interface=facts.egress_interface,
        here=tuple(host.name for host in listed if host.name in facts.here),
        user_mpi_variables=_user_variables(config, launcher.users_variables),
        left_out=left_out,
        instances=instances,
        precision=precision,
    )


def _decisions(job: _PlannedHosts, precision: PrecisionDecision) -> dict[Setting[Any], Any]:
    """Return setting → decided value, for settings that ranks and instances read."""
    transport = {Config.ccl.transport: job.transport.name} if job.transport.name else {}
    return {Config.training.precision: precision.precision, **transport}


def _rank_decisions(master: MasterAddress, backend: str) -> dict[Setting[Any], Any]:
    """Return setting → decided value, for settings that only ranks read."""
    return {Config.hosts.master_addr: master.address, Config.training.backend: backend}


def _speeds(job: _PlannedHosts) -> list[HostSpeed]:
    """Return the known speed of each host."""
    speeds = []
    for host, each in zip(job.hosts, job.bound, strict=True):
        known = each.facts
        speeds.append(HostSpeed(host.host, known.cpu, known.cpu_flags, known.rates_of(host.ranks[0].threads)))
    return speeds


# ---- the hosts


class _PlannedHosts(NamedTuple):
    """All hosts of the job.  ``env`` has the variables that all ranks share."""

    hosts: tuple[HostPlan, ...]
    bound: list[HostInput]
    request: HostRequest
    provider: str | None
    transport: Transport
    env: dict[str, str]
    notes: tuple[str, ...]


def _plan_all(
    config: Config, facts: Facts, listed: Sequence[Host], launcher: Launcher, backend: str
) -> _PlannedHosts:
    """Bind all ranks, plan communication for the host with the fewest cores per rank, and plan each host."""
    provider = choose_provider(config, backend, facts, listed)
    workers = wants_workers(config, backend, provider.name, len(listed))
    bound, request = bind_hosts(config, facts, listed, host_request(config, workers=workers))
    network = _network(config, bound, launcher, backend, provider)
    user_env = user_environment(config)
    inputs = []
    for each in bound:
        env = {name: value for name, value in network.of_host(each).items() if name not in user_env}
        inputs.append(replace(each, env=env))
    threads, hosts = _with_shared_threads(plan_hosts(inputs, request))
    binders = [name for name in BINDS_THREADS if name in user_env]
    notes = (
        *_binding_notes(bound),
        *provider.notes,
        network.transport.note,
        check_ports(config, backend, [len(host.ranks) for host in hosts]),
        *(note for host in hosts for note in host.notes),
        f"your {', '.join(binders)} binds OpenMP's threads; cpulaunch leaves them alone" if binders else "",
    )
    shared = _with_user_values(config, {**network.shared, **threads})
    return _PlannedHosts(hosts, bound, request, provider.name, network.transport, shared, notes)


class _Network(NamedTuple):
    """The transport of collectives, and the variables that configure it."""

    transport: Transport
    shared: dict[str, str]  # variables of all hosts
    of_host: Callable[[HostInput], dict[str, str]]  # further variables of a host


def _network(
    config: Config, bound: Sequence[HostInput], launcher: Launcher, backend: str, provider: Provider
) -> _Network:
    if backend == NO_BACKEND:
        return _Network(Transport(""), {}, lambda host: {})
    transport = choose_transport(
        config,
        backend,
        provider.name,
        hosts=len(bound),
        local_ranks=max(len(host.binding.ranks) for host in bound),
        workers=bound[0].binding.worker_count,
    )
    communication = plan_communication(config, bound, launcher, backend, provider.name, transport.name)

    def of_host(host: HostInput) -> dict[str, str]:
        several = len(bound) > 1
        return communication.of_host(interfaces_of(config, host.facts, provider.name, several=several))

    return _Network(transport, communication.shared, of_host)


def _instances(
    config: Config, program: Program, job: _PlannedHosts, listed: tuple[Host, ...]
) -> tuple[_PlannedHosts, tuple[Host, ...], Instances | None]:
    """Return the planned hosts, the listed hosts, and the job's instances, or None for a job of ranks.

    If only one instance is to run, the other hosts are removed.
    """
    if not are_wanted(config):
        return job, listed, None
    count = sum(len(host.ranks) for host in job.hosts)
    check_lines(program, count)
    number = config.instances.only
    if number == "all":
        return job, listed, Instances(count)
    hosts, request = only_one(config, number, job.hosts, job.request)
    its_host = tuple(host for host in listed if host.name == hosts[0].host)
    bound = [each for each in job.bound if each.name == hosts[0].host]
    # Notes about idle cores and other hosts don't concern the only instance.
    notes = tuple(note for note in job.notes if note not in _binding_notes(job.bound))
    job = job._replace(hosts=hosts, bound=bound, request=request, notes=notes)
    return job, its_host, Instances(count, number)


def _binding_notes(bound: Sequence[HostInput]) -> list[str]:
    return [
        f"{host.name}{' (assumed)' if host.assumed else ''}: {note}"
        for host in bound
        for note in host.binding.notes
    ]


def _with_shared_threads(hosts: tuple[HostPlan, ...]) -> tuple[dict[str, str], tuple[HostPlan, ...]]:
    """Move OMP_NUM_THREADS from the hosts' ranks to the shared variables if all ranks have the same."""
    shared = common({THREADS: rank.env[THREADS]} for host in hosts for rank in host.ranks)
    if not shared:
        return {}, hosts
    stripped = []
    for host in hosts:
        ranks = (
            rank._replace(env={k: v for k, v in rank.env.items() if k != THREADS}) for rank in host.ranks
        )
        stripped.append(host._replace(ranks=tuple(ranks)))
    return shared, tuple(stripped)


def _with_user_values(config: Config, variables: dict[str, str]) -> dict[str, str]:
    """Return ``variables``, with the user's values instead of planned ones."""
    decided = {name for setting, name in _FIELD_VARIABLES if config.is_set(setting)}
    return {
        name: value if name in decided else config.environ.get(name, value)
        for name, value in variables.items()
    }


# ---- the result


OF_EACH_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""Variables that every rank gets with its own value."""


def _unused_arguments(config: Config, launcher: Launcher) -> str:
    if not config.mpi.args or not launcher.this_host_only:
        return ""
    return f"{config.where(Config.mpi.args)}: has no effect, because no mpiexec starts the ranks"


def _environment(config: Config, job: _PlannedHosts, decided: Mapping[Setting[Any], Any]) -> dict[str, str]:
    """Return the variables of all programs.  Instances get neither a backend nor the master's address."""
    settings = rank_settings(config, decided)
    if are_wanted(config):
        del settings[variables.BACKEND]
        group = {}
    elif wrong := [name for name in OF_EACH_RANK if name in config.env]:
        raise PlanError(
            f"{config.where(Config.env)}: {wrong[0]} can't be set, because each rank has its own value",
            hint="-n and -ppn set the number of ranks, and --hosts the hosts",
        )
    else:
        group = {"MASTER_ADDR": decided[Config.hosts.master_addr]}
    if config.training.precision == "auto":
        settings[variables.PRECISION_IS_PLANNED] = "1"
    return dict(sorted({**job.env, **settings, **config.env, **group}.items()))


def _hidden_note(config: Config, hidden: Sequence[str]) -> str:
    # In a Slurm job, Slurm's variables describe the job itself, so every job would have the note.
    known = ("SLURM_",) if "SLURM_JOB_ID" in config.environ else ()
    found = [name for name in hidden if name in config.environ and not name.startswith(known)]
    if not found:
        return ""
    programs = "instances" if are_wanted(config) else "ranks"
    return (
        f"hidden from the {programs}, because they name other ranks: {shortened(found)} (-x NAME keeps one)"
    )


def _user_variables(config: Config, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of ``names`` that are set in the user's environment."""
    return tuple(sorted(name for name in names if name in config.environ))


def _left_out_note(chosen: LauncherDecision, names: Sequence[str]) -> str:
    if not names:
        return ""
    return (
        f"{chosen.launcher.title} doesn't get {shortened(list(names))}: cpulaunch places and starts the ranks"
    )


def _detected(config: Config, chosen: LauncherDecision, job: _PlannedHosts) -> dict[Setting[Any], Any]:
    """Return setting → detected value, for settings that are ``auto``."""
    found: dict[Setting[Any], Any] = {
        Config.launcher: chosen.setting,
        **({Config.hosts.nnodes: len(job.hosts)} if config.hosts.nnodes == "all" else {}),
        Config.cpu.threads: _one_or_list([rank.threads for host in job.hosts for rank in host.ranks]),
        **({} if are_wanted(config) else _detected_for_ranks(config, job)),
    }
    if chosen.mpiexec:
        found.update({Config.mpi.flavour: chosen.name, Config.mpi.path: chosen.mpiexec})
    if all(each.facts.libraries is not None for each in job.bound):
        libraries: dict[Setting[Any], set[str]] = {
            Config.cpu.allocator: {host.allocator for host in job.hosts},
            Config.cpu.openmp: {host.openmp for host in job.hosts},
        }
        for setting, names in libraries.items():
            if len(names) == 1 and names <= {"default", GLIBC, *FILES}:
                found[setting] = names.pop()
    return found


def _detected_for_ranks(config: Config, job: _PlannedHosts) -> dict[Setting[Any], Any]:
    """Return setting → detected value, for settings that apply to ranks only."""
    ranks = [len(host.ranks) for host in job.hosts]
    transport: str = config.ccl.transport
    if transport == "auto" or job.transport.note:
        transport = job.transport.name or transport
    workers = max(each.binding.worker_count if each.binding.worker_affinity else 0 for each in job.bound)
    return {
        Config.hosts.nproc: sum(ranks),
        Config.hosts.nproc_per_node: _one_or_list(ranks),
        Config.ccl.provider: job.provider or config.ccl.provider,
        Config.ccl.transport: transport,
        Config.ccl.worker_count: workers if config.ccl.worker_count == "auto" else config.ccl.worker_count,
    }


def _one_or_list(numbers: list[int]) -> int | list[int]:
    return numbers[0] if len(set(numbers)) == 1 else numbers
