"""Hosts, and parsers of hostfiles and of the lists of hosts on the command line.

A hostfile has one host per line: ``host``, ``host:N`` or ``host slots=N``, with ``#`` comments and blank
lines.  Open MPI's ``max_slots=N`` or ``max-slots=N`` may replace ``slots=N`` or follow it.  Names may be
ranges, ``node[01-04,07]``; IPv6 addresses need brackets if a count follows.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

from cpulaunch.errors import ConfigError
from cpulaunch.wording import did_you_mean

LOCALHOST = "localhost"
"""The name of this host if the user names no host."""

MAX_HOSTS = 100_000
"""Maximum hosts in a list; a longer list is likely to be a mistake."""

MAX_RANKS = 65_536
"""Maximum ranks of a job; a larger number is likely to be a mistake."""

MAX_DIGITS = 6
"""Maximum digits of a number in a list of hosts."""

MAX_NAME = 253
"""Maximum characters of a name (RFC 1035)."""

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_COUNT = re.compile(r"[0-9]+")
_LAST_NUMBER = re.compile(rf"(.*?)([0-9]{{1,{MAX_DIGITS}}})([^0-9]*)")


@dataclass(frozen=True)
class Host:
    """A host: the name or address that the user gave, and its number of slots (ranks), or None."""

    name: str
    slots: int | None = None


def all_here(hosts: Iterable[Host], here: Collection[str]) -> bool:
    """Return whether all ``hosts`` are this host, whose names are ``here``; True for an empty list."""
    return all(host.name == LOCALHOST or host.name in here for host in hosts)


def parse_hostfile(text: str, shown: str) -> tuple[Host, ...]:
    """Parse the ``text`` of a hostfile.  Raises ConfigError, which calls the file ``shown``."""
    hosts = _check_distinct(
        entry
        for number, line in enumerate(io.StringIO(text, newline=None), 1)
        if (content := line.partition("#")[0].strip())
        for entry in _entry(content, f"{shown}:{number}")
    )
    if not hosts:
        raise ConfigError(
            f"hostfile {shown}: names no host", hint="one host per line: host, host:N or host slots=N"
        )
    return hosts


def parse_hosts(text: str, shown: str) -> tuple[Host, ...]:
    """Parse a list such as ``a,b:2,node[01-04]``.  Raises ConfigError, which calls the list ``shown``."""
    if "," in _split(text):
        raise ConfigError(
            f"{shown}: {text!r} has a superfluous comma", part=",", hint="put one comma between two hosts"
        )
    return _check_distinct(entry for part in _split(text) for entry in _entry(part, shown))


def without(hosts: tuple[Host, ...], excluded: str, shown: str) -> tuple[Host, ...]:
    """Return ``hosts`` without the hosts in the list ``excluded``, all of which must be in ``hosts``."""
    names = {host.name for host in hosts}
    for host in parse_hosts(excluded, shown):
        if host.name not in names:
            raise ConfigError(
                f"{shown}: {host.name} is not among the hosts{did_you_mean(host.name, names)}", part=host.name
            )
        names.remove(host.name)
    return tuple(host for host in hosts if host.name in names)


MOST_NAMES = 4
"""Maximum names and ranges that ``fold_hosts`` lists."""


def fold_hosts(names: Iterable[str]) -> str:
    """Fold names into ranges, in their order: ``"node[1-4,7], login"``.

    Lists at most MOST_NAMES names and ranges, and then the number of the other hosts.
    """
    parts: list[tuple[tuple[str, str] | str, list[tuple[int, str]]]] = []
    for name in names:
        match = None if _is_ipv6(name) else _LAST_NUMBER.fullmatch(name)
        key = (match[1], match[3]) if match else name
        if not parts or parts[-1][0] != key or not match:
            parts.append((key, []))
        parts[-1][1].append((int(match[2]), match[2]) if match else (0, ""))
    shown = []
    for key, numbers in parts[:MOST_NAMES]:
        shown.append(key if isinstance(key, str) else _with_numbers(*key, numbers))
    left = sum(len(numbers) for _, numbers in parts[MOST_NAMES:])
    return ", ".join(shown) + (f" and {left} more" if left else "")


def _with_numbers(before: str, after: str, numbers: Sequence[tuple[int, str]]) -> str:
    ranges: list[list[tuple[int, str]]] = []
    for number, text in numbers:
        # All numbers of a range have as many digits as the first.
        if ranges and number == ranges[-1][-1][0] + 1 and text == f"{number:0{len(ranges[-1][0][1])}d}":
            ranges[-1].append((number, text))
        else:
            ranges.append([(number, text)])
    pieces = [r[0][1] if len(r) == 1 else f"{r[0][1]}-{r[-1][1]}" for r in ranges]
    inside = pieces[0] if len(numbers) == 1 else f"[{','.join(pieces)}]"
    return f"{before}{inside}{after}"


def _entry(content: str, origin: str) -> Iterator[tuple[Host, str]]:
    """Yield each host of an entry, together with ``origin``."""
    name, *words = content.split()
    slots = None
    if words:
        slots = _slots(name, words, origin)
    elif not _is_ipv6(name):
        # The last colon separates the count, unless it is within brackets, as in an IPv6 address.
        head, colon, count = name.rpartition(":")
        if colon and head.count("[") == head.count("]"):
            slots, name = _count(count, origin, content), head
    for each in _expand(name, origin):
        yield Host(_check_name(each, origin), slots), origin


def _slots(name: str, words: Sequence[str], origin: str) -> int:
    """Return N of ``slots=N``; without it, the number in ``max_slots``, as Open MPI 5.0.11 does."""
    counts: dict[str, int] = {}
    for word in words:
        key, _, count = word.partition("=")
        key = key.replace("-", "_")
        if key not in ("slots", "max_slots") or key in counts:
            raise ConfigError(
                f"{origin}: {word!r} after the host {name!r}",
                part=word,
                hint="one host per line: host, host:N or host slots=N",
            )
        counts[key] = _count(count, origin, word)
    most = counts.get("max_slots", MAX_RANKS)
    slots = counts.get("slots", most)
    if slots > most:
        raise ConfigError(f"{origin}: {slots} slots exceed max_slots, which is {most}", part=" ".join(words))
    return slots


def _count(text: str, origin: str, part: str) -> int:
    if not _COUNT.fullmatch(text) or not text.strip("0"):
        raise ConfigError(f"{origin}: {text!r} is not a number of slots: expected 1 or more", part=part)
    if len(text) > MAX_DIGITS or int(text) > MAX_RANKS:
        raise ConfigError(f"{origin}: {text} slots exceed {MAX_RANKS}, the maximum ranks of a job", part=part)
    return int(text)


def _expand(name: str, origin: str) -> Iterator[str]:
    """Yield the names of the ranges in ``name``, after checking that they are at most MAX_HOSTS."""
    pieces: list[list[tuple[range, int]]] = []  # for each bracket: its ranges, with the width of numbers
    texts: list[str] = []
    count = 1
    rest = name
    while True:
        text, bracket, after = rest.partition("[")
        inside, closed, tail = after.partition("]")
        if not bracket or (closed and _is_ipv6(inside)):
            break
        if not closed:
            raise ConfigError(f"{origin}: {name!r}: '[' without ']'", part=name)
        if len(texts) == MAX_NAME:  # each bracket becomes at least one character
            raise ConfigError(f"{origin}: {name!r} is not a host's name or address", part=name)
        texts.append(text)
        if inside.count(",") < MAX_HOSTS:
            pieces.append([_range(part, name, origin) for part in inside.split(",")])
            count *= sum(len(numbers) for numbers, _ in pieces[-1])
        if count > MAX_HOSTS or len(pieces) < len(texts):
            raise ConfigError(f"{origin}: {name!r} expands to more than {MAX_HOSTS} hosts", part=name)
        rest = tail
    numbers = [[f"{n:0{width}d}" for numbers, width in ranges for n in numbers] for ranges in pieces]
    for chosen in product(*numbers):
        yield "".join(chain.from_iterable(zip(texts, chosen, strict=True))) + rest


def _range(part: str, name: str, origin: str) -> tuple[range, int]:
    """Parse a range such as ``01-04``; return its numbers, and the minimum number of digits."""
    first, dash, last = part.partition("-")
    if not _COUNT.fullmatch(first) or (dash and not _COUNT.fullmatch(last)):
        raise ConfigError(f"{origin}: {part!r} in {name!r} is not a range such as 01-04", part=part)
    if max(len(first), len(last)) > MAX_DIGITS:
        raise ConfigError(
            f"{origin}: {part!r} in {name!r} has a number of more than {MAX_DIGITS} digits", part=part
        )
    numbers = range(int(first), int(last or first) + 1)
    if not numbers:
        raise ConfigError(f"{origin}: the range {part!r} in {name!r} is empty", part=part)
    return numbers, len(first)


def _check_name(name: str, origin: str) -> str:
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if _is_ipv6(bare):
        return bare
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{origin}: {name!r} is not a host's name or address",
            part=name,
            hint="set the user in ~/.ssh/config" if "@" in name else None,
        )
    return name


def _is_ipv6(text: str) -> bool:
    if ":" not in text:
        return False
    import ipaddress  # takes 5 ms, and few lists have IPv6 addresses

    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _check_distinct(entries: Iterable[tuple[Host, str]]) -> tuple[Host, ...]:
    seen: dict[str, tuple[str, int]] = {}
    hosts: list[Host] = []
    for host, origin in entries:
        if len(hosts) == MAX_HOSTS:
            raise ConfigError(f"{origin}: more than {MAX_HOSTS} hosts", part=host.name)
        if host.name in seen:
            before, number = seen[host.name]
            # In a hostfile, each line is an origin of its own; a list has one origin.
            where = f"first at {before}" if before != origin else f"as hosts {number} and {len(hosts) + 1}"
            bracketed = f"[{host.name}]" if _is_ipv6(host.name) else host.name
            raise ConfigError(
                f"{origin}: {host.name} is named twice, {where}",
                part=host.name,
                hint=f"say how many ranks it takes: {bracketed}:2",
            )
        hosts.append(host)
        seen[host.name] = origin, len(hosts)
    return tuple(hosts)


def _split(text: str) -> Iterator[str]:
    """Split at commas outside of brackets."""
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
