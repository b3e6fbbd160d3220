"""Formats the result of a bench as text and as JSON, with findings about the hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from cpulaunch.bench.limits import Limits, limit_us
from cpulaunch.wording import counted

SCHEMA = 1

SLOW_LINK = 0.7
"""Fraction of the nominal speed; a slower link is reported."""

ONE_IS_ENOUGH = 0.8
"""Fraction of the speed of all connections; a slower single connection is reported."""

BETTER_CARD = 2.0
"""Multiple of the speed of the network card in use; a card that is at least as fast is reported."""

_LINE = "{:14} {:>6} {:>10} {:>10} {:>24} {:>10} {:>11}"


class Row(NamedTuple):
    """One operation on tensors of ``size`` bytes: median times, the limit, and gloo ÷ ccl for each turn."""

    operation: str
    size: int
    ccl_us: float
    gloo_us: float
    limit_us: float
    ratios: tuple[float, ...]


class Host(NamedTuple):
    """A host with its ranks, their cores, and its network cards.  ``nominal``: card → speed in Mbit/s."""

    name: str
    cpu: str
    cpus: int
    ranks: int
    cores: int
    threads: int
    interface: str
    nominal: Mapping[str, int]


class Result(NamedTuple):
    """The result of a bench."""

    hosts: tuple[Host, ...]
    limits: Limits
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, measured: Mapping[str, Any]) -> Result:
        """Compute the result from the measurements that rank 0 has printed."""
        numbers: Sequence[int] = measured["hosts"]
        places = measured["places"]
        hosts = tuple(
            _host([place for place, of in zip(places, numbers, strict=True) if of == number])
            for number in dict.fromkeys(numbers)
        )
        limits = _limits(measured["speeds"], numbers, measured["copies"])
        rows = tuple(_row(turn, numbers, limits) for turn in measured["turns"])
        return cls(hosts, limits, rows)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--format json``."""
        return {
            "schema": SCHEMA,
            "hosts": [host._asdict() for host in self.hosts],
            "cpu": _cpus(self.hosts),
            "link_bytes_per_second": self.limits.link or None,
            "one_connection_bytes_per_second": self.limits.one_connection or None,
            "latency_us": self.limits.latency_us or None,
            "rows": [
                {
                    "operation": row.operation,
                    "bytes": row.size,
                    "ccl_us": row.ccl_us,
                    "gloo_us": row.gloo_us,
                    "limit_us": row.limit_us,
                    "gloo_over_ccl": [min(row.ratios), median(row.ratios), max(row.ratios)],
                }
                for row in self.rows
            ],
            "findings": list(self.findings()),
        }

    def text(self) -> Iterator[str]:
        """Yield the lines of the table and the findings."""
        ranks = sum(host.ranks for host in self.hosts)
        yield f"CPU: {_cpus(self.hosts)}"
        threads = "/".join(map(str, sorted({host.threads for host in self.hosts})))
        yield f"{counted(ranks, 'rank')} on {counted(len(self.hosts), 'host')}, threads of each: {threads}"
        largest = max(self.limits.copy_us)
        speed = largest / self.limits.copy_us[largest] / 1e3
        yield f"memory: each rank copies {short(largest)} at {speed:.1f} GB/s"
        if self.limits.link:
            whole, one = _gbit(self.limits.link), _gbit(self.limits.one_connection)
            yield f"link: {whole} Gbit/s between hosts, {one} over one connection"
            yield f"latency: {self.limits.latency_us:.0f} us, half of a round trip between hosts"
        yield ""
        yield _LINE.format("operation", "bytes", "ccl us", "gloo us", "gloo ÷ ccl", "limit us", "ccl ÷ limit")
        for row in self.rows:
            ratios = f"{median(row.ratios):.2f} ({min(row.ratios):.2f} to {max(row.ratios):.2f})"
            times = (f"{us:,.0f}" for us in (row.ccl_us, row.gloo_us))
            limit = f"{row.limit_us:,.0f}", f"{row.ccl_us / row.limit_us:.1f}"
            yield _LINE.format(row.operation, short(row.size), *times, ratios, *limit)
        yield from ("", *self.findings())

    def findings(self) -> Iterator[str]:
        """Yield a sentence about each bottleneck of the hosts."""
        for host in self.hosts if len(self.hosts) > 1 else ():
            yield from self._about_card(host)
        limits = self.limits
        if limits.link and limits.one_connection < ONE_IS_ENOUGH * limits.link:
            yield (
                f"one connection carries {_gbit(limits.one_connection)} of {_gbit(limits.link)} Gbit/s: "
                "several ranks per host (-ppn) use more of the link"
            )
        for host in self.hosts:
            if 2 * host.cores <= host.cpus:
                yield f"{host.name}: the ranks use only {host.cores} of {host.cpus} CPUs"
        if largest := max((row for row in self.rows if row.operation == "all_reduce"), default=None):
            yield from _about_memory(largest, limits)
        for row in self.rows:
            if max(row.ratios) < 1:
                yield f"{row.operation} of {short(row.size)} is slower with ccl than with gloo"

    def _about_card(self, host: Host) -> Iterator[str]:
        nominal = host.nominal.get(host.interface, 0)
        others = {name: speed for name, speed in host.nominal.items() if name != host.interface}
        best = max(others, key=lambda name: others[name], default="")
        if nominal and best and others[best] >= BETTER_CARD * nominal:
            yield (
                f"{host.name}: the ranks use {host.interface} ({nominal / 1000:g} Gbit/s), but {best} has "
                f"{others[best] / 1000:g} Gbit/s: try --interface {best}"
            )
        if nominal and self.limits.link * 8 < SLOW_LINK * nominal * 1e6:
            yield (
                f"{host.name}: {host.interface} has {nominal / 1000:g} Gbit/s nominally, but only "
                f"{_gbit(self.limits.link)} were measured"
            )


def short(size: int) -> str:
    """Format a number of bytes, such as ``4K``."""
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


def _host(places: Sequence[Mapping[str, Any]]) -> Host:
    first = places[0]
    return Host(
        name=first["host"],
        cpu=first["cpu"],
        cpus=first["host_cpus"],
        ranks=len(places),
        cores=len({core for place in places for core in place["cores"]}),
        threads=first["threads"],
        interface=first["interface"],
        nominal=first["nominal"],
    )


def _limits(speeds: Sequence[Sequence[float]], hosts: Sequence[int], copies: Mapping[str, float]) -> Limits:
    """Add the speeds of the ranks of each host; the slowest host sets the limit."""
    copied = {int(size): us for size, us in copies.items()}
    by_host: dict[int, list[Sequence[float]]] = {}
    for host, speed in zip(hosts, speeds, strict=True):
        by_host.setdefault(host, []).append(speed)
    if len(by_host) == 1:
        return Limits(copied)
    return Limits(
        copied,
        min(max(sum(s[1] for s in each), max(s[0] for s in each)) for each in by_host.values()),
        min(max(s[0] for s in each) for each in by_host.values()),
        max(s[2] for s in speeds),
    )


def _row(turn: Mapping[str, Any], hosts: Sequence[int], limits: Limits) -> Row:
    ccl, gloo = turn["us"]["ccl"], turn["us"]["gloo"]
    limit = limit_us(turn["operation"], turn["bytes"], hosts, limits)
    ratios = tuple(b / a for a, b in zip(ccl, gloo, strict=True))
    return Row(turn["operation"], turn["bytes"], median(ccl), median(gloo), limit, ratios)


def _cpus(hosts: Sequence[Host]) -> str:
    return " / ".join(dict.fromkeys(host.cpu for host in hosts))


def _gbit(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8e-9:.1f}"


def _about_memory(row: Row, limits: Limits) -> Iterator[str]:
    """Report that memory, not the link, limits a large all_reduce."""
    if limits.link and limits.copy_us[row.size] >= row.limit_us:
        yield (
            f"an all_reduce of {short(row.size)} is limited by the ranks' memory, not by the link: "
            "use more cores per rank (--cores-per-rank), or more ranks"
        )
