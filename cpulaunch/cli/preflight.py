"""Formats the results of checking hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cpulaunch.cli.terminal import has_unicode
from cpulaunch.discovery.probe.preflight import Report, folded_problems


def complaints(reports: Iterable[Report]) -> Iterator[str]:
    """Yield the problems of hosts, each with a remedy.  Equal problems of several hosts share a line."""
    for hosts, what, remedy in folded_problems(reports):
        yield f"{_signs()[1]} {hosts}: {what}"
        yield f"    {remedy}"


def table(reports: Sequence[Report]) -> Iterator[str]:
    """Yield the lines of a table with a row for each host."""
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
    """Return the marks for a host that is ready, and for a host that is not."""
    return ("✓", "✗") if has_unicode() else ("ok", "FAILED")
