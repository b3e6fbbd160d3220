"""Ask the hosts of a job whether they are ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpulaunch.config.config import Config
from cpulaunch.discovery.interfaces import interfaces_here
from cpulaunch.discovery.libraries import import_directories, library_directories
from cpulaunch.discovery.preflight import Report, egress_interface, report_on_hosts
from cpulaunch.discovery.probe import Progress, probe_hosts
from cpulaunch.discovery.probe_messages import ProbeRequest
from cpulaunch.launchers.reach import Reach
from cpulaunch.model.hosts import Host
from cpulaunch.model.network import Interface


@dataclass(frozen=True)
class Required:
    """What must be on every host: an interpreter, a working directory, and files.

    ``identical`` are files that must also have the same content everywhere.
    """

    python: str
    directory: str
    files: tuple[str, ...] = ()
    identical: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preflight:
    """A report on each host, this host's interface to the others, and a free port on the first host."""

    reports: tuple[Report, ...]
    egress_interface: Interface | None
    free_port: int | None


def check_hosts(
    config: Config,
    hosts: Sequence[Host],
    here: frozenset[str],
    required: Required,
    reach: Reach,
    progress: Progress,
) -> Preflight:
    """Ask ``hosts``, of whom the first will be the master.  ``here`` are this host's names."""

    def chosen(key: str) -> str | None:
        return None if config[key] == "auto" else str(config[key])

    request = ProbeRequest(
        python=required.python,
        directory=required.directory,
        files=list(dict.fromkeys(required.files)),
        identical=list(required.identical),
        packages=list(import_directories()),
        libraries=list(library_directories()),
        master=chosen("hosts.master_addr") or hosts[0].name,
        port=int(chosen("hosts.master_port") or 0),
        interface=chosen("ccl.interface"),
    )
    responses = probe_hosts([host.name for host in hosts], here, request, reach, progress)
    first = responses[hosts[0].name].answer
    return Preflight(
        report_on_hosts(responses, request),
        egress_interface(responses, interfaces_here()),
        first.listening if first else None,
    )
