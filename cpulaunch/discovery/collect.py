"""Collect the facts that planning needs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cpulaunch.config.config import Config
from cpulaunch.discovery.batch.allocation import allocation, cpus_of_nodes, operators_hostfile, read_hostfile
from cpulaunch.discovery.batch.slurm_job import restricted_to_job, slurm_job, without_ended_job
from cpulaunch.discovery.batch.step import NAME as BY_STEP
from cpulaunch.discovery.batch.step import (
    addresses_of,
    can_start,
    demand_inside,
    demand_step,
    part_of_nodes,
)
from cpulaunch.discovery.host.files import read_file
from cpulaunch.discovery.host.installation import find_mpis
from cpulaunch.discovery.host.interfaces import interfaces_here
from cpulaunch.discovery.host.lscpu import topology_from_lscpu
from cpulaunch.discovery.host.this_host import facts_here, names_here
from cpulaunch.errors import ConfigError
from cpulaunch.model.facts import Facts, HostFacts, Mpi, read_record
from cpulaunch.model.hosts import Host, all_here, parse_hosts, without
from cpulaunch.plan.plan import Program
from cpulaunch.plan.select import (
    decide_launcher,
    demand_master_addr,
    first_hosts,
    leaves_launcher_to_us,
    master_elsewhere,
    may_use_mpi,
    ranks_per_host,
)
from cpulaunch.user_file import FACTS_LIMIT, read_user_file
from cpulaunch.wording import counted

if TYPE_CHECKING:
    from cpulaunch.discovery.probe.probe import Progress

Tell = Callable[[str], None]


class Ccl(NamedTuple):
    """Functions that report on the backend ccl on this host."""

    missing: Callable[[], str | None]  # why ccl can't be used; None if it can, or if the job doesn't use it
    files: Callable[[], tuple[str, ...]]  # the compiled files that must be the same on all hosts


def collect_facts(
    config: Config, ccl: Ccl, tell: Tell, progress: Progress, program: Program | None = None
) -> Facts:
    """Collect the facts of this host and, if there is a ``program`` to run, of the job's other hosts.

    The other hosts are probed by the launcher's own means, unless the user skips preflight.  ``tell`` shows a
    line to the user, and ``progress`` shows the state of the probes.  Raises HostError if hosts aren't ready,
    and ConfigError if settings contradict the facts.
    """
    job = slurm_job(config.environ)
    config = without_ended_job(config, job, tell)
    named = named_hosts(config, tell)
    listed = first_hosts(config, named) if named else ()
    here = facts_here(environ={**config.environ, **config.env})
    names = names_here() if listed or job else here.names
    here = replace(here, topology=restricted_to_job(here.topology, job, names))
    elsewhere = any(host.name not in names for host in listed)
    if not elsewhere:  # otherwise preflight checks this on all hosts
        _demand_interface(config)
        if program:
            _demand_master_address(config)
    elif program:
        demand_master_addr(config, listed)
        _demand_master_on_first(config, listed)
    once_each(listed, names)
    demand_inside(config, listed, names)
    if program:
        demand_step(config, listed)
    mpis = mpis_for(config, listed, names)
    step = elsewhere and has_step(config, listed, tell)
    chosen = decide_launcher(config, here_alone=not elsewhere, mpis=mpis, step=step)
    facts = Facts(
        like=here,
        listed=listed,
        spares=named[len(listed) :],
        shares=cpus_of_nodes(config.environ) if chosen.name == BY_STEP else {},
        hosts={host.name: here for host in listed if host.name in names},
        here=names,
        mpis=mpis,
        ccl_missing=ccl.missing(),  # may build ccl, which the probes then look for
        step=step,
    )
    if program and elsewhere and operators_hostfile(config.environ):
        from cpulaunch.discovery.batch.workers import wait_for_workers

        wait_for_workers([host.name for host in listed if host.name not in names], tell)
    return ask_hosts(config, facts, program, ccl.files, tell, progress) if program else facts


def mpis_for(config: Config, listed: Sequence[Host], here: frozenset[str]) -> tuple[Mpi, ...]:
    """The MPIs of this host; empty if the job on the ``listed`` hosts won't use an MPI."""
    if not may_use_mpi(config, here_alone=all_here(listed, here)):
        return ()
    return find_mpis(config.mpi.flavour, config.mpi.path)


def has_step(config: Config, listed: Sequence[Host], tell: Tell) -> bool:
    """Whether a Slurm step can start ranks on the ``listed`` hosts, and the user has not chosen a launcher.

    If not, warn if ranks could use CPUs of other Slurm jobs.
    """
    if can_start(config, listed):
        return True
    if decide_launcher(config, here_alone=False).name != BY_STEP and (part := part_of_nodes(config, listed)):
        tell(f"warning: {part}, and ranks that ssh starts can use all of them: use --launcher slurm")
    return False


def ask_hosts(
    config: Config,
    facts: Facts,
    program: Program,
    ccl_files: Callable[[], tuple[str, ...]],
    tell: Tell,
    progress: Progress,
) -> Facts:
    """Probe the listed hosts, and add their facts and a free port of the first host to ``facts``.

    Don't probe if the user skips preflight, or if all ranks run here.  Raises HostError if hosts aren't
    ready.
    """
    listed, names = facts.listed, facts.here
    here_alone = all_here(listed, names)
    chosen = decide_launcher(config, here_alone=here_alone, mpis=facts.mpis, step=facts.step)
    if here_alone or config.hosts.skip_preflight or chosen.launcher.this_host_only:
        if not here_alone and config.hosts.skip_preflight:
            _warn_of_unknown_name(config, listed[0].name, tell)
        return replace(facts, free_port=None)
    # This import takes 30 ms, and jobs on one machine don't need it.
    from cpulaunch.discovery.probe.check_hosts import Required, check_hosts
    from cpulaunch.discovery.probe.preflight import demand_ready

    ranks_per_host(config, listed)  # raises an error if the numbers don't match
    script = program.argv[1] if program.python and program.argv[1] != "-m" else program.argv[0]
    files = (str(Path(program.directory, script)),)
    required = Required(program.interpreter, program.directory, files, ccl_files())
    preflight = check_hosts(config, listed, names, required, progress, facts.mpis or (), facts.step)
    demand_ready(preflight.reports, tell)
    return replace(
        facts,
        hosts={report.host: report.facts for report in preflight.reports if report.facts},
        egress_interface=preflight.egress_interface,
        free_port=preflight.free_port,
        without_mpi=preflight.without_mpi,
    )


def facts_of_lscpu(config: Config, file: Path) -> Facts:
    """Facts for hosts with the CPUs that ``file``, an output of lscpu, describes.  Raises ConfigError."""
    text = _read(file)
    try:
        topology = topology_from_lscpu(text)
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}", hint=e.hint, part=e.part) from None
    return Facts(
        like=HostFacts(topology),
        listed=_named(config),
        like_what=f"the one in {file}",
        mpis_here=_mpis_here(config),
    )


def recorded_facts(config: Config, file: Path) -> Facts:
    """Facts from a facts file.  Other hosts than the file's are assumed to be like its first host."""
    hosts = read_record(_read(file), str(file))
    return Facts(
        like=next(iter(hosts.values())),
        listed=_named(config) or tuple(map(Host, hosts)),
        hosts=hosts,
        like_what=f"the first in {file}",
        mpis_here=_mpis_here(config),
    )


def _mpis_here(config: Config) -> tuple[Mpi, ...]:
    """The MPIs of this host, if the user has not chosen a launcher."""
    return find_mpis("auto", "auto") if leaves_launcher_to_us(config) else ()


def _demand_interface(config: Config) -> None:
    """Raise ConfigError if this host doesn't have the interface that the user has chosen."""
    names = sorted({interface.name for interface in interfaces_here()})
    chosen = config.ccl.interface
    if chosen not in ("auto", *names):
        raise ConfigError(
            f"{config.where(Config.ccl.interface)}: this machine has no interface {chosen}",
            hint=f"it has {', '.join(names)}",
        )


def _demand_master_address(config: Config) -> None:
    """Raise ConfigError if the chosen MASTER_ADDR isn't an address of this machine."""
    chosen = config.hosts.master_addr
    if chosen == "auto":
        return
    where = config.where(Config.hosts.master_addr)
    try:
        found = socket.getaddrinfo(chosen, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        why = getattr(e, "strerror", None) or "not a valid host name"
        raise ConfigError(f"{where}: {chosen}: {why}", hint="omit it to use 127.0.0.1") from None
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return
    own = ", ".join(dict.fromkeys(interface.address for interface in interfaces_here()))
    raise ConfigError(f"{where}: {chosen} is not an address of this machine", hint=f"it has {own}")


def _demand_master_on_first(config: Config, listed: Sequence[Host]) -> None:
    """Raise ConfigError if the chosen MASTER_ADDR belongs to another of the listed hosts than the first."""
    chosen, (first, *others) = config.hosts.master_addr, listed
    if chosen == "auto" or chosen == first.name:
        return
    addresses = addresses_of(chosen)
    if not addresses or addresses & addresses_of(first.name):
        return
    for host in others:
        if addresses & addresses_of(host.name):
            raise master_elsewhere(config, host.name, first.name)


def _warn_of_unknown_name(config: Config, first: str, tell: Tell) -> None:
    """Warn if this machine can't resolve the name of the ``first`` host.

    With preflight, the name need not be known, as the host reports its address.
    """
    if config.hosts.master_addr == "auto" and not addresses_of(first):
        tell(
            f"warning: this machine knows no address of {first}, where the ranks meet: if only "
            "ssh's configuration has the name, set --master-addr to an address that all hosts can resolve"
        )


def listed_hosts(config: Config, tell: Tell) -> tuple[Host, ...]:
    """The hosts of the job: the first ``nnodes`` of `named_hosts`."""
    named = named_hosts(without_ended_job(config, slurm_job(config.environ), tell), tell)
    return first_hosts(config, named) if named else ()


def named_hosts(config: Config, tell: Tell) -> tuple[Host, ...]:
    """All hosts that the user named, or else the allocation's hosts, without excluded hosts."""
    hosts = _named(config)
    elsewhere = not decide_launcher(config, here_alone=False).launcher.this_host_only
    if not hosts and elsewhere and (given := allocation(config.environ, read_file)):
        hosts = _excluded(config, given.hosts)
        several = " ..." if len(hosts) > 1 else ""
        tell(f"{given.name} gives {counted(len(hosts), 'host')}: {hosts[0].name}{several}")
    if config.hosts.exclude and not hosts:
        raise ConfigError(
            f"{config.where(Config.hosts.exclude)}: the job runs only on this machine",
            hint="name its hosts with --hosts or --hostfile, or leave it out",
        )
    return hosts


def once_each(listed: Sequence[Host], here: frozenset[str]) -> None:
    """Raise ConfigError if two of the ``listed`` hosts are this machine."""
    ours = [host.name for host in listed if host.name in here]
    if len(ours) > 1:
        raise ConfigError(
            f"{ours[0]} and {ours[1]} are both this machine",
            hint="name it once, and set its number of ranks with -ppn N or slots=N",
            part=ours[1],
        )


def _named(config: Config) -> tuple[Host, ...]:
    hostfile, inline = config.hosts.hostfile, config.hosts.list
    if hostfile and inline:
        raise ConfigError(
            f"{config.where(Config.hosts.hostfile)} and {config.where(Config.hosts.list)} both name hosts",
            hint="give one of them",
        )
    if hostfile:
        hosts = read_hostfile(Path(hostfile))
    elif inline:
        hosts = parse_hosts(inline, config.origin(Config.hosts.list).text)
    else:
        return ()
    return _excluded(config, hosts)


def _excluded(config: Config, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    if excluded := config.hosts.exclude:
        hosts = without(hosts, excluded, config.origin(Config.hosts.exclude).text)
        if not hosts:
            raise ConfigError(f"{config.where(Config.hosts.exclude)}: no host is left")
    return hosts


def _read(path: Path) -> str:
    try:
        return read_user_file(path, FACTS_LIMIT).decode()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
