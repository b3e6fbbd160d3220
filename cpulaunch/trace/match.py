"""Finds the parts of a collective in several ranks' traces."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from cpulaunch.trace.model import Collective, Note, RankTrace

SLACK = 200.0
"""Microseconds by which a record and its event may differ.  An event of gloo may begin later still, when one
of gloo's threads is free."""

MESSAGES = ("send", "recv", "recvAnySource", "recv_anysource")
"""Kinds of messages, which are not matched, as sender and receiver number them differently."""


def match(ranks: Sequence[RankTrace]) -> list[list[tuple[RankTrace, Collective]]]:
    """Return the collectives that several ranks have traced, each as a list of parts ordered by start.

    Sets ``key``, ``last`` and ``last_rank`` of the collectives, as far as they are known.
    """
    together: dict[tuple[str, str, int], list[tuple[RankTrace, Collective]]] = {}
    for rank in ranks:
        identify(rank.collectives, rank.notes)
        for each in rank.collectives:
            if each.key:
                together.setdefault(each.key, []).append((rank, each))
    found = []
    for parts in together.values():
        if len(parts) > 1 and len({part.kind for _, part in parts}) == 1:
            parts.sort(key=lambda part: part[1].begin)
            rank, last = parts[-1]
            for _, part in parts:
                part.last, part.last_rank = last.begin, rank.rank
            found.append(parts)
    return found


def identify(collectives: Sequence[Collective], notes: Sequence[Note]) -> None:
    """Set the keys of a rank's collectives from its records."""
    ordered = sorted((each for each in collectives if each.kind not in MESSAGES), key=lambda each: each.begin)
    # ccl's records have the exact times of events, but other names; gloo's records have the names of events.
    _by_time([each for each in ordered if each.backend == "ccl"], [n for n in notes if n.backend == "ccl"])
    for backend, kind in {(note.backend, note.kind) for note in notes if note.backend != "ccl"}:
        same = [each for each in ordered if (each.backend, each.kind) == (backend, kind)]
        _by_time(same, [note for note in notes if (note.backend, note.kind) == (backend, kind)])
    for backend in {note.backend for note in notes}:
        if len({note.group for note in notes if note.backend == backend}) == 1:
            of_group = [each for each in ordered if each.backend == backend]
            _by_order(of_group, 1)
            _by_order(of_group[::-1], -1)


def _by_time(collectives: Sequence[Collective], notes: Sequence[Note]) -> None:
    """Assign each record to the event that begins at its time, else to the next unassigned event."""
    begins = [each.begin for each in collectives]
    free = 0
    for note in sorted(notes, key=lambda note: note.at):
        at = max(free, bisect_left(begins, note.at - SLACK))
        while at + 1 < len(begins) and abs(begins[at + 1] - note.at) < min(SLACK, abs(begins[at] - note.at)):
            at += 1
        if at < len(begins):
            collectives[at].key = note.backend, note.group, note.number
            free = at + 1


def _by_order(collectives: Sequence[Collective], step: int) -> None:
    """Derive missing keys from neighbours.  In a backend's only group, numbers are consecutive."""
    for before, each in pairwise(collectives):
        if each.key is None and before.key:
            backend, group, number = before.key
            each.key = backend, group, number + step
