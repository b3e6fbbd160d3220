"""Chooses a job's hosts, the number of ranks on each host, and the launcher."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from cpulaunch import launchers
from cpulaunch.config.config import Config
from cpulaunch.config.values import HostCount
from cpulaunch.errors import ConfigError, HostError, PlanError
from cpulaunch.launchers.base import Launcher
from cpulaunch.model.facts import Facts, Mpi
from cpulaunch.model.hosts import LOCALHOST, MAX_RANKS, Host, all_here, fold_hosts
from cpulaunch.model.network import Interface, is_loopback
from cpulaunch.plan.environment import to_forward
from cpulaunch.plan.instances import are_wanted
from cpulaunch.wording import counted

FEW = 3
"""Maximum unusable hosts whose reasons a message gives."""


def check_restarts(config: Config) -> None:
    """Raise ConfigError if ``--stall-action`` contradicts other settings."""
    action, where = config.watch.stall_action, config.where(Config.watch.stall_action)
    if action != "report" and config.watch.stall_timeout == 0:
        never = config.where(Config.watch.stall_timeout)
        raise ConfigError(
            f"{where}: {never} is 0, which switches stall detection off", hint="--stall-timeout auto"
        )
    if action == "restart" and not config.watch.max_restarts:
        raise ConfigError(f"{where}: no restart is allowed", hint="--max-restarts N allows N restarts")
    if action == "restart" and config.watch.restart_on == "never":
        never = config.where(Config.watch.restart_on)
        raise ConfigError(
            f"{where}: {never} is never, which forbids restarts",
            hint="--restart-on failure, or --stall-action abort",
        )


def first_hosts(config: Config, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """Return the first of ``hosts``, as many as the user wants.  Raises PlanError if there are fewer."""
    wanted = wanted_hosts(config, len(hosts))
    if wanted.least > len(hosts):
        raise PlanError(
            f"{config.where(Config.hosts.nnodes)}: {counted(wanted.least, 'host')}, "
            f"but only {len(hosts)} named",
            hint="name more hosts by -f HOSTFILE or --hosts a,b; in Slurm, submit the job with "
            f"--nodes={wanted.least}",
        )
    return hosts[: wanted.most]


def wanted_hosts(config: Config, named: int) -> HostCount:
    """Return the minimum and the maximum number of hosts of a job that may use ``named`` hosts."""
    return HostCount(named, named) if config.hosts.nnodes == "all" else config.hosts.nnodes


def remaining_hosts(
    config: Config, named: Sequence[Host], avoid: Container[str], unusable: Mapping[str, str]
) -> tuple[Host, ...]:
    """Return the hosts for another attempt of a job, without ``unusable`` hosts (host → reason).

    Hosts in ``avoid`` are used only if there are too few others.  Raises HostError if too few hosts remain.
    """
    wanted = wanted_hosts(config, len(named))
    usable = [host for host in named if host.name not in unusable]
    good = [host.name for host in usable if host.name not in avoid][: wanted.most]
    if missing := max(0, wanted.least - len(good)):
        good += [host.name for host in usable if host.name in avoid][:missing]
    if len(good) < wanted.least:
        why = "; ".join(f"{host}: {reason}" for host, reason in list(unusable.items())[:FEW])
        verb = "remains" if len(good) == 1 else "remain"
        left = f"only {len(good)} of the required {counted(wanted.least, 'host')} {verb}"
        hint = "--nnodes MIN:MAX continues on fewer hosts; further hosts in the list are spares"
        raise HostError(f"{left} ({why})", hint=hint)
    return tuple(host for host in usable if host.name in good)


def ranks_per_host(config: Config, hosts: Sequence[Host]) -> dict[str, int | None]:
    """Return host name → number of ranks; None if its topology decides (`binding._default_ranks`).

    Raises PlanError if the numbers don't agree, or are too large.
    """
    counts = _wanted_ranks(config, hosts)
    _check_total(sum(count or 1 for count in counts.values()), "wanted")  # each host has at least one
    return counts


def _check_total(ranks: int, how: str) -> None:
    if ranks > MAX_RANKS:
        raise PlanError(
            f"{ranks} ranks are {how}: a job may have {MAX_RANKS}",
            hint="--nnodes N takes the first N hosts, and -ppn N starts N ranks on each",
        )


def _wanted_ranks(config: Config, hosts: Sequence[Host]) -> dict[str, int | None]:
    if are_wanted(config):
        return _instances_on(config, hosts)
    ppn, total = config.hosts.nproc_per_node, config.hosts.nproc
    if ppn != "auto":
        counts: dict[str, int | None] = {host.name: ppn for host in hosts}
    elif any(host.slots for host in hosts):
        counts = {host.name: host.slots for host in hosts}
    elif total != "auto":
        if total % len(hosts):
            where = config.where(Config.hosts.nproc)
            raise PlanError(
                f"{where}: {counted(total, 'rank')} can't be divided evenly over {len(hosts)} hosts",
                hint="set each host's number by slots=N in the hostfile, by -ppn N, or by Slurm's --ntasks",
            )
        return {host.name: total // len(hosts) for host in hosts}
    else:
        return {host.name: None for host in hosts}
    known = sum(count or 0 for count in counts.values())
    if total != "auto" and None not in counts.values() and known != total:
        source = config.where(Config.hosts.nproc_per_node) if ppn != "auto" else "the hosts' slots"
        raise PlanError(
            f"{config.where(Config.hosts.nproc)}: {counted(total, 'rank')}, but {source} make {known} on "
            f"{counted(len(hosts), 'host')}",
            hint="leave out one of the two, or make them agree",
        )
    return counts


def _instances_on(config: Config, hosts: Sequence[Host]) -> dict[str, int | None]:
    """Return the same number of instances for each host.  Slots of a hostfile don't apply to instances."""
    count = config.instances.count
    if not isinstance(count, int):
        return {host.name: None for host in hosts}
    if count % len(hosts):
        fits = max(number for number in range(1, len(hosts)) if count % number == 0)
        raise PlanError(
            f"{config.where(Config.instances.count)}: {counted(count, 'instance')} can't be divided evenly "
            f"over {len(hosts)} hosts",
            hint=f"--nnodes {fits} takes {counted(fits, 'host')} of these, and --cores-per-instance C alone "
            "starts as many as fit on each",
        )
    return {host.name: count // len(hosts) for host in hosts}


def checked_world_size(config: Config, world_size: int) -> int:
    """Return ``world_size``.  Raise PlanError if it is too large, or contradicts ``-n`` or ``--stdin``."""
    _check_total(world_size, "planned, by the hosts' topologies")
    total = config.hosts.nproc
    if total != "auto" and total != world_size:
        wanted = f"{config.where(Config.hosts.nproc)}: {counted(total, 'rank')}"
        raise PlanError(
            f"{wanted}, but slots and topologies make {world_size}",
            hint="give every host its slots, or use -ppn N",
        )
    if (reader := config.output.stdin) >= world_size:
        raise PlanError(
            f"{config.where(Config.output.stdin)}: there is no rank {reader}, as there are {world_size}",
            hint="ranks are numbered from 0; without --stdin, rank 0 reads stdin",
        )
    return world_size


class LauncherDecision(NamedTuple):
    """The launcher of the ranks."""

    setting: str  # value of the setting ``launcher``; mpirun for any MPI
    name: str  # the launcher's name, such as intel
    mpiexec: str = ""  # path of the MPI's mpiexec; empty if there is none
    why: str = ""  # the reason, if cpulaunch chose a launcher for several hosts

    @property
    def launcher(self) -> Launcher:
        """The launcher object."""
        return launchers.load(self.name)

    @property
    def shown(self) -> str:
        """The launcher's title, with the path of mpiexec and the reason, as plans show it."""
        path = f", {self.mpiexec}" if self.mpiexec else ""
        why = f" ({self.why})" if self.why else ""
        return f"{self.launcher.title}{path}{why}"

    @property
    def by_mpi(self) -> bool:
        """Whether an MPI's mpiexec starts the ranks."""
        return self.setting == "mpirun"


class WayToHosts(NamedTuple):
    """How this host can start ranks on other hosts."""

    without_mpi: Sequence[str] | None = None  # hosts that lack the first MPI; None if no host was asked
    egress: Interface | None = None  # this host's interface to the other hosts, if known


NOBODY_ASKED = WayToHosts()


def decide_launcher(
    config: Config,
    *,
    here_alone: bool,
    mpis: Sequence[Mpi] | None = None,
    step: bool = False,
    mpis_here: Sequence[Mpi] = (),
    way: WayToHosts = NOBODY_ASKED,
) -> LauncherDecision:
    """Choose the launcher.

    ``here_alone``: all ranks are on this host.  ``mpis``, ``step`` and ``mpis_here`` are fields of `Facts`.
    ``mpis`` is None before MPIs have been searched for.
    """
    usable = mpis_here if mpis is None else mpis
    setting, why = config.launcher, ""
    if setting == "auto":
        if not leaves_launcher_to_us(config):
            setting = "mpirun"
        elif here_alone:
            setting = "local"
        elif step:
            setting, why = "slurm", "in an allocation of Slurm"
        else:
            setting, why = _mpi_or_ssh(usable, way)
    if setting != "mpirun":
        return LauncherDecision(setting, setting, why=why)
    flavour = config.mpi.flavour
    for mpi in usable:
        if flavour in ("auto", mpi.flavour):
            return LauncherDecision(setting, mpi.flavour, mpi.path, why)
    preferred = launchers.load_mpi(flavour)
    return LauncherDecision(setting, preferred.name, preferred.executables[0] if mpis is None else "")


def _mpi_or_ssh(mpis: Sequence[Mpi], way: WayToHosts) -> tuple[str, str]:
    """Return the setting's value and the reason: an MPI unless a host is known to lack it, else ssh."""
    without_mpi, egress = way
    if not mpis:
        return "ssh", "no MPI was found here"
    if egress and ":" in egress.address and (mpi := launchers.load_mpi(mpis[0].flavour)).over_ipv6 is None:
        return "ssh", f"{mpi.title} reaches hosts by IPv4 only"
    if without_mpi:
        return "ssh", f"{fold_hosts(without_mpi)}: there is no {mpis[0].path}"
    if without_mpi is None:
        return "mpirun", "found here; the other hosts were not asked"
    return "mpirun", "found on all hosts"


def may_use_mpi(config: Config, *, here_alone: bool) -> bool:
    """Return whether an MPI starts the ranks, or would start them if one were installed."""
    if leaves_launcher_to_us(config):
        return not here_alone
    return decide_launcher(config, here_alone=here_alone).by_mpi


def leaves_launcher_to_us(config: Config) -> bool:
    """Return whether the user requests neither a launcher nor an MPI."""
    return config.launcher == "auto" and config.mpi.flavour == "auto" and config.mpi.path == "auto"


def chosen_launcher(config: Config, facts: Facts, hosts: tuple[Host, ...]) -> LauncherDecision:
    """Choose the launcher.  Raises PlanError if it isn't installed, or can't reach ``hosts``."""
    here_alone = all_here(hosts, facts.here)
    decision = decide_launcher(
        config,
        here_alone=here_alone,
        mpis=facts.mpis,
        step=facts.step,
        mpis_here=facts.mpis_here,
        way=WayToHosts(facts.without_mpi, facts.egress_interface),
    )
    if decision.by_mpi and not decision.mpiexec:
        raise _no_mpi(config, facts.mpis or ())
    if not here_alone and decision.launcher.this_host_only:
        raise PlanError(
            f"{config.where(Config.launcher)}: {decision.setting} starts ranks on this machine only, but the "
            f"hosts are {fold_hosts(host.name for host in hosts)}",
            hint="--launcher ssh, mpirun, or slurm in an allocation",
        )
    return decision


def _no_mpi(config: Config, mpis: Sequence[Mpi]) -> PlanError:
    flavour, path = config.mpi.flavour, config.mpi.path
    found = "; found: " + ", ".join(f"{m.flavour} ({m.path})" for m in mpis) if mpis else ""
    place = "" if path == "auto" else f" in {path} ({config.origin(Config.mpi.path)})"
    what = "no MPI" if flavour == "auto" else f"no mpiexec of {flavour} ({config.origin(Config.mpi.flavour)})"
    return PlanError(
        f"{what} was found{place}{found}",
        hint=f"{launchers.load_mpi(flavour).install_hint}; --mpi-path names the directory of one; "
        "--launcher ssh needs none",
    )


class MasterAddress(NamedTuple):
    """The name or address of the rendezvous of the ranks, and a note about it for the user."""

    address: str
    note: str = ""


def chosen_master_addr(
    config: Config, facts: Facts, launcher: Launcher, hosts: tuple[Host, ...]
) -> MasterAddress:
    """Return where the ranks meet: the user's address, else the first host's.

    Raises PlanError if the first host has only a loopback address, which other hosts can't reach.  Raises
    ConfigError if `demand_master_addr` does.
    """
    demand_master_addr(config, hosts)
    chosen, first = config.hosts.master_addr, hosts[0].name
    if len(hosts) == 1 or are_wanted(config):
        here = launcher.this_host_only or first == LOCALHOST
        return MasterAddress(("127.0.0.1" if here else first) if chosen == "auto" else chosen)
    if chosen != "auto":
        return MasterAddress(chosen)
    found, assumed = facts.of(first)
    # Other hosts may resolve the first host's name differently, so its address is better.
    address = found.address if found.address and not assumed else first
    if not is_loopback(address) or all(is_loopback(host.name) for host in hosts):
        return MasterAddress(address)
    own = sorted(name for name in found.names if not assumed and not is_loopback(name))
    if not own:
        raise PlanError(
            f"the ranks meet on the first host, but other hosts can't reach {address}",
            hint="name the host by an address that others reach, or set hosts.master_addr (--master-addr)",
        )
    return MasterAddress(own[0], f"the ranks meet at {own[0]}, as {address} is a loopback address")


def demand_master_addr(config: Config, hosts: Sequence[Host]) -> None:
    """Raise ConfigError if the user's master address can't be an address of the first host.

    The first rank listens on the first host, so ranks would wait for minutes.
    """
    chosen, (first, *others) = config.hosts.master_addr, hosts
    if not others or are_wanted(config):
        return
    where = config.where(Config.hosts.master_addr)
    if is_loopback(chosen):
        raise ConfigError(
            f"{where}: {chosen} is a loopback address, which other hosts can't reach",
            hint=f"leave it out, or name an address by which the others reach {first.name}",
        )
    if chosen != first.name and any(chosen == host.name for host in others):
        raise master_elsewhere(config, chosen, first.name)


def master_elsewhere(config: Config, host: str, first: str) -> ConfigError:
    """Return the error for a user's address that belongs to ``host`` instead of the ``first`` host."""
    chosen = config.hosts.master_addr
    where = config.where(Config.hosts.master_addr)
    what = chosen if chosen == host else f"{chosen}, which is {host},"
    return ConfigError(
        f"{where}: {what} is not the first host, {first}, where the ranks meet",
        hint=f"leave it out, or name {host} first",
    )


def forwarded_names(config: Config, facts: Facts, launcher: Launcher, hosts: tuple[Host, ...]) -> list[str]:
    """Return the names of the variables that the launcher has to pass to the ranks, each once.

    These are the names given by ``-x``.  If the launcher passes no variables by itself, all variables that
    are useful on other hosts are added.
    """
    for name in config.forward:
        if name not in config.environ:
            raise ConfigError(
                f"{config.where(Config.forward)}: {name} is not set in this environment",
                hint=f"--env {name}=VALUE sets it for the ranks",
                part=name,
            )
    passes = launcher.passes_environment
    needed = to_forward(config.environ) if not passes and not all_here(hosts, facts.here) else []
    return list(dict.fromkeys((*config.forward, *needed)))
