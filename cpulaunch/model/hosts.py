"""Hosts and where they are named: hostfiles, lists on the command line.

A hostfile has one host per line: ``host``, ``host:N`` or ``host slots=N``, with ``#`` comments and blank
lines.  Names may be ranges, ``node[01-04,07]``; IPv6 addresses stand in brackets where a count follows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from cpulaunch.errors import ConfigError
from cpulaunch.wording import did_you_mean

LOCALHOST = "localhost"
"""What this host is called where the user names none."""

MAX_RANGE = 100_000
"""Hosts that one range may stand for; beyond it is a slip."""

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_COUNT = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True)
class Host:
    """A host by the name or address that the user gave, and the number of slots (ranks), if given."""

    name: str
    slots: int | None = None


def all_here(hosts: Iterable[Host], here: Collection[str]) -> bool:
    """Whether all of ``hosts`` are this one, whose names are ``here``; without any, the job stays here."""
    return all(host.name == LOCALHOST or host.name in here for host in hosts)


def parse_hostfile(text: str, shown: str) -> tuple[Host, ...]:
    """The hosts of a hostfile's ``text``; errors name it as ``shown``."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if content := line.partition("#")[0].strip():
            entries += [(host, f"{shown}:{number}") for host in _entry(content, f"{shown}:{number}")]
    if not entries:
        raise ConfigError(
            f"hostfile {shown}: names no host", hint="one host per line: host, host:N or host slots=N"
        )
    return _distinct(entries)


def parse_hosts(text: str, shown: str) -> tuple[Host, ...]:
    """The hosts of a list such as ``a,b:2,node[01-04]``; errors name it as ``shown``."""
    return _distinct([(host, shown) for part in _split(text) for host in _entry(part, shown)])


def without(hosts: tuple[Host, ...], excluded: str, shown: str) -> tuple[Host, ...]:
    """``hosts`` without those that the list ``excluded`` names, each of which must be there."""
    names = {host.name for host in hosts}
    for host in parse_hosts(excluded, shown):
        if host.name not in names:
            raise ConfigError(
                f"{shown}: {host.name} is not among the hosts{did_you_mean(host.name, names)}", part=host.name
            )
        names.remove(host.name)
    return tuple(host for host in hosts if host.name in names)


def _entry(content: str, origin: str) -> Iterator[Host]:
    """The hosts of one entry: more than one where its name is a range."""
    name, *words = content.split()
    slots = None
    if words:
        key, _, count = words[0].partition("=")
        if key != "slots" or len(words) > 1:
            junk = words[1] if key == "slots" else words[0]
            raise ConfigError(
                f"{origin}: {junk!r} after the host {name!r}",
                part=junk,
                hint="one host per line: host, host:N or host slots=N",
            )
        slots = _count(count, origin, words[0])
    elif not _is_ipv6(name):
        # The last colon outside of brackets, which ranges and IPv6 addresses have.
        head, colon, count = name.rpartition(":")
        if colon and "]" not in count:
            slots, name = _count(count, origin, content), head
    for each in _expanded(name, origin):
        yield Host(_checked(each, origin), slots)


def _count(text: str, origin: str, part: str) -> int:
    if not _COUNT.fullmatch(text) or int(text) == 0:
        raise ConfigError(f"{origin}: {text!r} is not a number of slots: expected 1 or more", part=part)
    return int(text)


def _expanded(name: str, origin: str) -> Iterator[str]:
    head, bracket, rest = name.partition("[")
    inside, closed, tail = rest.partition("]")
    if not bracket or _is_ipv6(inside):
        yield name
        return
    if not closed:
        raise ConfigError(f"{origin}: {name!r}: '[' without ']'", part=name)
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        if not _COUNT.fullmatch(first) or (dash and not _COUNT.fullmatch(last)):
            raise ConfigError(f"{origin}: {part!r} in {name!r} is not a range such as 01-04", part=part)
        numbers = range(int(first), int(last or first) + 1)
        if not 0 < len(numbers) <= MAX_RANGE:
            raise ConfigError(
                f"{origin}: the range {part!r} in {name!r} stands for {len(numbers)} hosts", part=part
            )
        for number in numbers:
            for end in _expanded(tail, origin):
                yield f"{head}{number:0{len(first)}d}{end}"


def _checked(name: str, origin: str) -> str:
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if _is_ipv6(bare):
        return bare
    if not _NAME.fullmatch(name):
        user = "@" in name
        raise ConfigError(
            f"{origin}: {name!r} is not a host's name or address",
            part=name,
            hint="set the user in ~/.ssh/config" if user else None,
        )
    return name


def _is_ipv6(text: str) -> bool:
    if ":" not in text:
        return False
    import ipaddress  # 5 ms, for the few who use them

    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _distinct(entries: Iterable[tuple[Host, str]]) -> tuple[Host, ...]:
    seen: dict[str, str] = {}
    hosts = []
    for host, origin in entries:
        if host.name in seen:
            raise ConfigError(
                f"{origin}: {host.name} is named twice, first at {seen[host.name]}",
                part=host.name,
                hint="say how many ranks it takes with slots=N",
            )
        seen[host.name] = origin
        hosts.append(host)
    return tuple(hosts)


def _split(text: str) -> Iterator[str]:
    """Cut at commas outside of brackets."""
    depth, part = 0, ""
    for letter in [*text, ","]:
        if letter == "," and depth == 0:
            yield part.strip() or ","
            part = ""
        else:
            depth += (letter == "[") - (letter == "]")
            part += letter
    if part:
        yield part.rstrip(",")
