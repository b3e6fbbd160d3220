"""Check whether the hosts of a job are ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpulaunch.config.config import Config
from cpulaunch.discovery.host import master_port
from cpulaunch.discovery.host.interfaces import interfaces_here, route_to
from cpulaunch.discovery.host.libraries import import_directories, library_directories
from cpulaunch.discovery.host.rate_cache import limits_of_ranks
from cpulaunch.discovery.probe.messages import ProbeRequest, ProbeResponse
from cpulaunch.discovery.probe.preflight import Report, egress_interface, report_on_hosts
from cpulaunch.discovery.probe.probe import Progress, probe_hosts
from cpulaunch.model.facts import Mpi
from cpulaunch.model.hosts import Host, all_here
from cpulaunch.model.network import Interface
from cpulaunch.plan.select import decide_launcher, leaves_launcher_to_us


@dataclass(frozen=True)
class Required:
    """The paths that must exist on every host."""

    python: str
    directory: str
    files: tuple[str, ...] = ()
    identical: tuple[str, ...] = ()  # files that must have the same content on all hosts


@dataclass(frozen=True)
class Preflight:
    """The result of probing the hosts.  ``without_mpi`` has the same meaning as in `Facts`."""

    reports: tuple[Report, ...]
    egress_interface: Interface | None  # this host's interface to the others
    free_port: int | None  # on the first host
    without_mpi: tuple[str, ...] | None = None


def check_hosts(
    config: Config,
    hosts: Sequence[Host],
    here: frozenset[str],
    required: Required,
    progress: Progress,
    mpis: Sequence[Mpi] = (),
    step: bool = False,
) -> Preflight:
    """Probe ``hosts`` by the launcher's own means.  The first host is the master.

    ``here`` are this host's names; ``mpis`` and ``step`` have the same meaning as in `Facts`.  If the user
    has chosen mpirun, the first MPI must be on all hosts.
    """
    chosen = decide_launcher(config, here_alone=all_here(hosts, here), mpis=mpis, step=step)
    reach = chosen.launcher.reach
    mpi = [mpi.path for mpi in mpis[:1]]
    optional = mpi if leaves_launcher_to_us(config) else []
    files = [*required.files, *(path for path in mpi if path not in optional)]
    address, interface = config.hosts.master_addr, config.ccl.interface
    request = ProbeRequest(
        python=required.python,
        directory=required.directory,
        files=list(dict.fromkeys(files)),
        optional=optional,
        identical=list(required.identical),
        packages=list(import_directories()),
        libraries=list(library_directories()),
        master=hosts[0].name if address == "auto" else address,
        ports=master_port.candidates(config.hosts.master_port, config.hosts.ports),
        interface=None if interface == "auto" else interface,
        limits=limits_of_ranks({**config.environ, **config.env}),
    )
    responses = probe_hosts([host.name for host in hosts], here, request, reach, progress)
    first = responses[hosts[0].name].answer
    reports = report_on_hosts(responses, request, reach)
    return Preflight(
        reports,
        egress_interface(responses, interfaces_here()) or _interface_to(reports, here),
        first.listening if first else None,
        _without_files(responses, optional) if optional else None,
    )


def _without_files(responses: Mapping[str, ProbeResponse], optional: Sequence[str]) -> tuple[str, ...]:
    """The hosts that have answered, but lack one of the files ``optional``."""
    answers = {host: response.answer for host, response in responses.items() if response.answer}
    return tuple(host for host, answer in answers.items() if set(optional) & set(answer.missing))


def _interface_to(reports: Sequence[Report], here: frozenset[str]) -> Interface | None:
    """This host's interface to the others according to its routes.

    Only ssh makes a host report the address from which it was probed.  This is for other launchers.
    """
    addresses = (r.facts.address for r in reports if r.facts and r.facts.address and r.host not in here)
    if (address := next(addresses, None)) is None:
        return None
    _, ours = route_to(address)
    return next((interface for interface in interfaces_here() if interface.address == ours), None)
