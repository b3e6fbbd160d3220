"""Gather the facts that planning needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cpulaunch.cli.backend import ccl_missing
from cpulaunch.cli.main import say
from cpulaunch.config.config import Config
from cpulaunch.discovery.allocation import allocation
from cpulaunch.discovery.this_host import read_file
from cpulaunch.errors import ConfigError
from cpulaunch.model.facts import Facts, HostFacts, read_record
from cpulaunch.model.hosts import Host, parse_hosts, read_hostfile, without
from cpulaunch.model.topology import Topology
from cpulaunch.plan.make import ranks_per_host
from cpulaunch.plan.plan import Program


def gather(
    config: Config,
    *,
    facts_file: Path | None,
    lscpu_file: Path | None,
    program: Program | None = None,
    tell: Callable[[str], None] = say,
) -> Facts:
    """The facts: of this host, or of the hosts that a file describes, without a look at this one.

    Where there is a ``program`` to run, the hosts are asked over ssh; HostError where they aren't ready.
    """
    if facts_file and lscpu_file:
        raise ConfigError("--facts and --lscpu both describe hosts", hint="give one of them")
    listed = _named(config)
    if lscpu_file:
        text = _read(lscpu_file)
        try:
            topology = Topology.from_lscpu(text)
        except ConfigError as e:
            raise ConfigError(f"{lscpu_file}: {e}", hint=e.hint, part=e.part) from None
        return Facts(like=HostFacts(topology), listed=listed, like_what=f"the one in {lscpu_file}")
    if facts_file:
        hosts = read_record(_read(facts_file), str(facts_file))
        return Facts(
            like=next(iter(hosts.values())),
            listed=listed or tuple(map(Host, hosts)),  # the job's, where no others are named
            hosts=hosts,
            like_what=f"the first in {facts_file}",
        )

    from cpulaunch.discovery.local import facts_here, find_mpis, names_here

    listed = listed_hosts(config, tell)
    here = facts_here()
    names = names_here() if listed else here.names
    if all(host.name in names for host in listed):
        _demand_interface(config)  # else preflight asks all hosts
    once_each(listed, names)
    mpis = find_mpis(config["mpi.flavour"], config["mpi.path"]) if uses_mpi(config, listed, names) else ()
    hosts = {host.name: here for host in listed if host.name in names}
    missing = ccl_missing(config, build=program is not None, tell=tell)  # built before hosts are asked for it
    way_out, free_port = None, None
    if program and len(hosts) < len(listed) and not config["hosts.skip_preflight"]:
        from cpulaunch.cli.preflight import ask, demand_ready

        ranks_per_host(config, listed)  # numbers that don't fit needn't wait for any host
        script = program.argv[1] if program.python and program.argv[1] != "-m" else program.argv[0]
        files = [str(Path(program.directory, script)), *(mpi.path for mpi in mpis[:1])]
        preflight = ask(config, listed, names, program.interpreter, program.directory, files)
        demand_ready(preflight.reports)
        hosts = {report.host: report.facts for report in preflight.reports if report.facts}
        way_out, free_port = preflight.way_out, preflight.free_port
    return Facts(
        like=here,
        listed=listed,
        hosts=hosts,
        here=names,
        mpis=mpis,
        way_out=way_out,
        free_port=free_port,
        ccl_missing=missing,
    )


def _demand_interface(config: Config) -> None:
    """ConfigError where the interface that was asked for isn't there."""
    from cpulaunch.discovery.interfaces import interfaces_here

    there = sorted({interface.name for interface in interfaces_here()})
    if config["ccl.interface"] not in ("auto", *there):
        raise ConfigError(
            f"{config.where('ccl.interface')}: this machine has no interface {config['ccl.interface']}",
            hint=f"it has {', '.join(there)}",
        )


def listed_hosts(config: Config, tell: Callable[[str], None] = say) -> tuple[Host, ...]:
    """The hosts that the user named, or else those of the allocation that we are in; the first ``nnodes``."""
    hosts = _named(config)
    if not hosts and config["launcher"] != "local" and (given := allocation(config.environ, read_file)):
        hosts = _excluded(config, given.hosts)
        tell(f"{given.name} gives {len(hosts)} hosts: {hosts[0].name}{' ...' if len(hosts) > 1 else ''}")
    wanted = config["hosts.nnodes"]
    return hosts if wanted == "all" or wanted > len(hosts) else hosts[:wanted]


def once_each(listed: Sequence[Host], here: frozenset[str]) -> None:
    """ConfigError where two of the hosts are names of this one."""
    ours = [host.name for host in listed if host.name in here]
    if len(ours) > 1:
        raise ConfigError(
            f"{ours[0]} and {ours[1]} are both this machine",
            hint="name it once, and say how many ranks it takes with -ppn N or slots=N",
            part=ours[1],
        )


def uses_mpi(config: Config, listed: Sequence[Host], here: frozenset[str]) -> bool:
    """Whether an MPI will start the ranks."""
    if config["launcher"] == "mpirun" or config["mpi.flavour"] != "auto" or config["mpi.path"] != "auto":
        return True
    here_alone = not listed or (len(listed) == 1 and listed[0].name in here)
    return config["launcher"] == "auto" and not here_alone


def _named(config: Config) -> tuple[Host, ...]:
    hostfile, inline = config["hosts.hostfile"], config["hosts.list"]
    if hostfile and inline:
        raise ConfigError(
            f"{config.where('hosts.hostfile')} and {config.where('hosts.list')} both name hosts",
            hint="give one of them",
        )
    if hostfile:
        hosts = read_hostfile(Path(hostfile))
    elif inline:
        hosts = parse_hosts(inline, config.origins["hosts.list"])
    else:
        return ()
    return _excluded(config, hosts)


def _excluded(config: Config, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    if config["hosts.exclude"]:
        hosts = without(hosts, config["hosts.exclude"], config.origins["hosts.exclude"])
        if not hosts:
            raise ConfigError(f"{config.where('hosts.exclude')}: no host is left")
    return hosts


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
