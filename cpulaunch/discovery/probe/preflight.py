"""Report whether each host is ready, from the hosts' answers.  No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from cpulaunch.discovery.host.interfaces import select_interfaces
from cpulaunch.discovery.probe.messages import (
    ANSWER_TIMEOUT,
    NO_CPULAUNCH,
    NO_PYTHON,
    ProbeAnswer,
    ProbeRequest,
    ProbeResponse,
)
from cpulaunch.errors import HostError
from cpulaunch.launchers.reach import ANY_HOST, UNRESOLVED, Reach, without_name
from cpulaunch.model.facts import HostFacts
from cpulaunch.model.hosts import fold_hosts
from cpulaunch.model.network import Interface
from cpulaunch.wording import PORT_IS_TAKEN, counted

T = TypeVar("T")

MAX_CLOCK_DIFFERENCE = 30.0
"""The largest difference between clocks in seconds.  Above it, logs can't be compared, and NFS caches
fail."""

MIN_SHM = 1 << 28
"""Bytes of /dev/shm that DataLoader workers and shared-memory collectives need."""

FOLD_FROM = 3
"""Equal messages of at least this many hosts are merged into one."""


@dataclass(frozen=True)
class Problem:
    """Why a host isn't ready, and what to do about it.  Both texts have ANY_HOST for the host's name."""

    what: str
    remedy: str
    hopeless: bool = False  # the launcher can't start ranks there
    is_local: bool = True  # the problem disappears if the host is excluded

    def text(self, host: str) -> tuple[str, str]:
        """Both texts with the name of ``host``."""
        return self.what.replace(ANY_HOST, host), self.remedy.replace(ANY_HOST, host)


@dataclass(frozen=True)
class Report:
    """A host's facts, problems and warnings."""

    host: str
    facts: HostFacts | None = None
    versions: Mapping[str, str | None] | None = None
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def unreached(self) -> bool:
        """Whether the launcher can't start ranks on the host."""
        return any(problem.hopeless for problem in self.problems)


class HostsNotReadyError(HostError):
    """Some hosts have problems.  ``reports`` has their reports."""

    def __init__(self, message: str, reports: tuple[Report, ...], *, hint: str | None) -> None:
        super().__init__(message, hint=hint)
        self.reports = reports


def report_on_hosts(
    responses: Mapping[str, ProbeResponse], request: ProbeRequest, reach: Reach
) -> tuple[Report, ...]:
    """Report on each host, in the order of ``responses``.  The first response is the master's."""
    answers = {host: response.answer for host, response in responses.items() if response.answer is not None}
    interfaces = select_interfaces(answers, request.interface)
    duplicates, majority = _duplicates(interfaces), _majority(answers)
    master = next(iter(responses))
    # If ssh can't resolve the master's name, don't also report that hosts can't connect to it.
    unresolved = request.master == master and UNRESOLVED in responses[master].error
    several, master_is_unreachable = (
        len(answers) > 1 and not unresolved,
        bool(responses[master].connect_error),
    )
    reports = []
    for host, response in responses.items():
        if response.answer is None:
            reports.append(Report(host, problems=(_no_answer(host, response, request, reach),)))
            continue
        facts = _facts(response.answer, interfaces[host])
        problems = [
            *_missing(response.answer, request),
            *_differences(response.answer, majority),
            *_clock(response),
            *_network(host, response, request, interfaces[host], master, several, master_is_unreachable),
        ]
        if same := duplicates.get(host):
            problems.append(
                Problem(f"is the same host as {same}", "name it once, with slots=N for its ranks")
            )
        reports.append(
            Report(host, facts, response.answer.versions, tuple(problems), tuple(_warnings(response.answer)))
        )
    return _add_comparison(reports)


def egress_interface(
    responses: Mapping[str, ProbeResponse], interfaces: Iterable[Interface]
) -> Interface | None:
    """The first of this host's ``interfaces`` from which other hosts were reached; None if unknown."""
    addresses = [response.answer.reached_from for response in responses.values() if response.answer]
    return next((interface for interface in interfaces if interface.address in addresses), None)


def folded_problems(reports: Iterable[Report]) -> Iterator[tuple[str, str, str]]:
    """Yield ``(hosts, what, remedy)``.

    Equal problems of FOLD_FROM or more hosts are merged.  Their texts contain the name of the first host, so
    that users can paste commands.
    """
    for hosts, name, problem in _fold((r.host, problem) for r in reports for problem in r.problems):
        yield hosts, *problem.text(name)


def _fold(found: Iterable[tuple[str, T]]) -> Iterator[tuple[str, str, T]]:
    """Group pairs of host and value by value.  Yield all hosts as a text, the first host, and the value."""
    groups: dict[T, list[str]] = {}
    for host, value in found:
        groups.setdefault(value, []).append(host)
    for value, hosts in groups.items():
        if len(hosts) < FOLD_FROM:
            yield from ((host, host, value) for host in hosts)
        else:
            yield fold_hosts(hosts), hosts[0], value


def warnings(reports: Iterable[Report]) -> Iterator[str]:
    """Yield a line for each warning.  Equal warnings of many hosts are merged."""
    for hosts, _, warning in _fold((report.host, line) for report in reports for line in report.warnings):
        yield f"warning: {hosts}: {warning}"


def demand_ready(reports: Sequence[Report], tell: Callable[[str], None]) -> None:
    """Show the hosts' warnings by ``tell``, and raise HostsNotReadyError if a host has problems."""
    for warning in warnings(reports):
        tell(warning)
    bad = tuple(report for report in reports if report.problems)
    if not bad:
        return
    kinds = {problem.is_local for report in bad for problem in report.problems}
    several = f"{len(bad)} of {len(reports)} hosts {'is' if len(bad) == 1 else 'are'}"
    hints = ["--exclude omits hosts"] if len(bad) < len(reports) and True in kinds else []
    if False not in kinds and not any(report.unreached for report in bad):
        hints.insert(0, "--skip-preflight starts the job anyway")
    raise HostsNotReadyError(
        f"{several if len(reports) > 1 else f'{bad[0].host} is'} not ready",
        bad,
        hint="; ".join(hints) or None,
    )


# ---- a host that didn't answer


def _no_answer(host: str, response: ProbeResponse, request: ProbeRequest, reach: Reach) -> Problem:
    if response.exit_code is None and response.error:
        remedy = "`ulimit -n` and `ulimit -u` show how many files and processes you may have here"
        return Problem(response.error, remedy)
    if response.exit_code is None:
        return Problem(
            f"no answer within {ANSWER_TIMEOUT:.0f} s", f"`{reach.by_hand(ANY_HOST)}` may show the reason"
        )
    if response.exit_code in (NO_PYTHON, NO_CPULAUNCH):
        what = f"{request.python} exists, but cpulaunch is not installed at the same path as here"
        if response.exit_code == NO_PYTHON:
            what = f"there is no {request.python}"
        return Problem(what, "install the same environment there, at the same path, or share it over NFS")
    last = without_name(host, response.error.splitlines()[-1].strip()) if response.error else ""
    if obstacle := reach.obstacle(host, response.exit_code, response.error):
        return Problem(*obstacle)
    return Problem(
        f"its answer is malformed (exit code {response.exit_code}{f': {last}' if last else ''})",
        f"does a startup file such as ~/.bashrc end the shell?  Try: {reach.by_hand(ANY_HOST)}",
    )


# ---- a host that answered


def _facts(answer: ProbeAnswer, interface: Interface | None) -> HostFacts | None:
    if answer.facts is None:
        return None
    return replace(
        HostFacts.from_json(answer.facts),
        interface=interface.name if interface else None,
        address=interface.address if interface else None,
    )


def _missing(answer: ProbeAnswer, request: ProbeRequest) -> Iterable[Problem]:
    if answer.facts_error:
        yield Problem(answer.facts_error, "is /sys mounted?")
    if not answer.directory:
        yield Problem(
            f"there is no directory {request.directory}",
            "copy it there, or share it over NFS; ranks start in it on every host",
        )
    for file in answer.missing:
        if file not in request.optional:
            yield Problem(f"there is no {file}", "copy it there, or share it over NFS")


def _majority(answers: Mapping[str, ProbeAnswer]) -> dict[tuple[str, str], tuple[str | None, str]]:
    """For each version and digest, the value of most hosts, and one of these hosts."""
    counts: dict[tuple[str, str], Counter[str | None]] = {}
    example: dict[tuple[str, str, str | None], str] = {}
    for host, answer in answers.items():
        for kind in ("versions", "digests"):
            for name, value in getattr(answer, kind).items():
                counts.setdefault((kind, name), Counter())[value] += 1
                example.setdefault((kind, name, value), host)
    most = {key: counter.most_common(1)[0][0] for key, counter in counts.items()}
    return {key: (value, example[(*key, value)]) for key, value in most.items()}


def _differences(
    answer: ProbeAnswer, majority: Mapping[tuple[str, str], tuple[str | None, str]]
) -> Iterable[Problem]:
    """Problems with versions and files that differ from the majority's."""
    for (kind, name), (value, host) in majority.items():
        own = getattr(answer, kind).get(name)
        if own == value:
            continue
        if kind == "versions":
            what = f"{name} {own or 'is not installed'}, but {value or 'none'} on {host}"
            yield Problem(what, "install the same version there")
        else:
            what = f"{name} is not there" if own is None else f"{name} is another file than on {host}"
            yield Problem(what, "run `cpulaunch ccl build` on that host, or use --backend gloo")


def _clock(response: ProbeResponse) -> Iterable[Problem]:
    """A problem if the host's clock is far outside of our times of request and answer."""
    assert response.answer
    time = response.answer.time
    difference = max(0.0, time - response.received) or min(0.0, time - response.sent)
    if abs(difference) > MAX_CLOCK_DIFFERENCE:
        yield Problem(
            f"its clock is {abs(difference):.0f} s {'ahead of' if difference > 0 else 'behind'} this host's",
            "let chrony or ntpd keep the clocks together",
        )


def _network(
    host: str,
    response: ProbeResponse,
    request: ProbeRequest,
    interface: Interface | None,
    master: str,
    several: bool,
    master_is_unreachable: bool,
) -> Iterable[Problem]:
    """Problems with the host's interface, the master's port, and the connection to the master.

    ``several`` says that several hosts have answered and the master's name is known.
    ``master_is_unreachable`` says that even the master can't reach its own address.  This is reported only
    for the master.
    """
    assert response.answer
    names = sorted({row[0] for row in response.answer.interfaces})
    if interface is None and request.interface:
        yield Problem(
            f"has no interface {request.interface} with an address; it has {', '.join(names)}",
            "use --interface auto",
        )
    elif interface is None and several:
        yield Problem(
            f"no interface leads to {request.master}; it has {', '.join(names)}",
            "select one with --interface",
        )
    if response.answer.listen_error:
        ports = sorted(request.ports)
        which = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]}-{ports[-1]}"
        what = f"{which}: {response.answer.listen_error}"
        yield Problem(what, PORT_IS_TAKEN, is_local=False)
    if response.connect_error and host == master:
        yield Problem(
            f"can't connect to {request.master}, where the ranks meet: {response.connect_error}",
            f"use --master-addr auto, which selects an address of {ANY_HOST}",
        )
    elif response.connect_error and not master_is_unreachable:
        yield Problem(
            f"can't connect to {master}, where the ranks meet: {response.connect_error}",
            "open the hosts' firewalls for all TCP between them, or for the ports of a --port-range",
        )


def _warnings(answer: ProbeAnswer) -> Iterable[str]:
    if (shm := answer.shm) is not None and shm < MIN_SHM:
        yield f"/dev/shm holds only {shm >> 20} MB; DataLoader workers and collectives may need more"


# ---- hosts among each other


def _duplicates(interfaces: Mapping[str, Interface | None]) -> dict[str, str]:
    """Map each host that has the address of an earlier host to that earlier host."""
    first: dict[str, str] = {}
    duplicates = {}
    for host, interface in interfaces.items():
        if interface and first.setdefault(interface.address, host) != host:
            duplicates[host] = first[interface.address]
    return duplicates


def _add_comparison(reports: Sequence[Report]) -> tuple[Report, ...]:
    """Add warnings for hosts with fewer cores or CPU features than most, as they slow down the others."""
    known = {r.host: r.facts for r in reports if r.facts}
    if not known:
        return tuple(reports)
    cores = Counter(len(f.topology.cores) for f in known.values()).most_common(1)[0][0]
    flags = Counter(f.cpu_flags for f in known.values()).most_common(1)[0][0] or ()
    done = []
    for report in reports:
        slow = []
        if facts := known.get(report.host):
            if (own := len(facts.topology.cores)) < cores:
                slow.append(
                    f"has {counted(own, 'core')}, but most hosts have {cores}; the others will wait for it"
                )
            if missing := [flag for flag in flags if flag not in (facts.cpu_flags or ())]:
                slow.append(f"lacks {', '.join(missing)}, unlike most hosts; the others will wait for it")
        done.append(replace(report, warnings=(*report.warnings, *slow)))
    return tuple(done)
