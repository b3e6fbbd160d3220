"""Ask the hosts of a job whether they are ready, and show what they say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cpulaunch.cli.main import say
from cpulaunch.cli.terminal import has_unicode
from cpulaunch.config.config import Config
from cpulaunch.discovery.interfaces import interfaces_here
from cpulaunch.discovery.libraries import import_directories, library_directories
from cpulaunch.discovery.preflight import Report, judge, way_out
from cpulaunch.discovery.probe import ask_hosts
from cpulaunch.discovery.probe_messages import Question
from cpulaunch.errors import HostError
from cpulaunch.model.hosts import Host
from cpulaunch.model.network import Interface


@dataclass(frozen=True)
class Preflight:
    """What the hosts said: a report on each, this host's way out to them, a free port on the first."""

    reports: tuple[Report, ...]
    way_out: Interface | None
    free_port: int | None


def ask(
    config: Config,
    hosts: Sequence[Host],
    here: frozenset[str],
    python: str,
    directory: str,
    files: Iterable[str],
) -> Preflight:
    """Ask ``hosts``, of whom the first will be the master.

    ``here`` are this host's names.  ``python`` will run there, in ``directory``; ``files`` must be there.
    """
    said = {
        key: None if config[key] == "auto" else config[key]
        for key in ("hosts.master_addr", "hosts.master_port", "ccl.interface")
    }
    question = Question(
        python=python,
        directory=directory,
        files=tuple(dict.fromkeys(files)),
        alike=_ccl_files(config),
        packages=import_directories(),
        libraries=library_directories(),
        master=said["hosts.master_addr"] or hosts[0].name,
        port=said["hosts.master_port"] or 0,
        interface=said["ccl.interface"],
    )
    replies = ask_hosts([host.name for host in hosts], here, question)
    first = replies[hosts[0].name].answer or {}
    return Preflight(judge(replies, question), way_out(replies, interfaces_here()), first.get("listening"))


def demand_ready(reports: Sequence[Report]) -> None:
    """Say what there is to say of the hosts; HostError where one isn't ready."""
    bad = [report for report in reports if report.problems]
    for report in reports:
        for warning in report.warnings:
            say(f"warning: {report.host}: {warning}")
    if bad:
        for line in complaints(bad):
            say(line)
        several = f"{len(bad)} of {len(reports)} hosts {'is' if len(bad) == 1 else 'are'}"
        hints = ["--exclude leaves hosts out"] if len(bad) < len(reports) else []
        if not any(problem.hopeless for report in bad for problem in report.problems):
            hints.insert(0, "--skip-preflight starts all the same")
        raise HostError(
            f"{several if len(reports) > 1 else f'{bad[0].host} is'} not ready", hint="; ".join(hints) or None
        )


def complaints(reports: Iterable[Report]) -> Iterator[str]:
    """Lines that name each host's problems with their remedies."""
    for report in reports:
        for problem in report.problems:
            yield f"{_signs()[1]} {report.host}: {problem.what}"
            yield f"    {problem.remedy}"


def table(reports: Sequence[Report]) -> Iterator[str]:
    """A line for each host, with what was found there."""
    rows = [("", "host", "address", "interface", "cores", "memory", "Python", "torch"), *map(_row, reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(report: Report) -> tuple[str, ...]:
    tick = _signs()[bool(report.problems)]
    facts, versions = report.facts, report.versions or {}
    if facts is None:
        return (tick, report.host, *(["-"] * 6))
    memory = f"{facts.memory / 2**30:.0f} GB" if facts.memory else "-"
    return (
        tick,
        report.host,
        facts.address or "-",
        facts.interface or "-",
        str(len(facts.topology.cores)),
        memory,
        versions.get("Python") or "-",
        versions.get("torch") or "-",
    )


def _signs() -> tuple[str, str]:
    """Of a host that is ready, and of one that isn't."""
    return ("✓", "✗") if has_unicode() else ("ok", "FAILED")


def _ccl_files(config: Config) -> tuple[str, ...]:
    """The compiled ccl group, which must be the same on all hosts."""
    if config["training.backend"] not in ("auto", "ccl"):
        return ()
    from cpulaunch.ccl.installed import state

    built = state().built
    return (str(built.module),) if built else ()
