"""Match the parts of a collective in the traces of several ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from cpulaunch.trace.model import Collective, Note, RankTrace

SLACK = 200.0
"""Microseconds by which the times of a rank's records and of its events may differ.

An event of gloo begins when one of gloo's threads is free, which may be later.
"""

MESSAGES = ("send", "recv", "recvAnySource", "recv_anysource")
"""Messages, which are not matched: their two ends have no number in common."""


def match(ranks: Sequence[RankTrace]) -> list[list[tuple[RankTrace, Collective]]]:
    """Return the collectives that more than one rank has traced, each as its parts ordered by start.

    Sets ``key`` of each collective if it is known.  Also sets ``last`` and ``last_rank`` of the returned
    collectives: the last part to begin, which holds up the others.
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
    """Set the keys of a rank's collectives, as far as its records contain them."""
    ordered = sorted((each for each in collectives if each.kind not in MESSAGES), key=lambda each: each.begin)
    # ccl's records have the times of its events, but ccl's own names of operations.  gloo's have torch's.
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
    """Assign to each record the event that begins at its time, else the next event that is not assigned."""
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
    """Derive missing keys from their neighbours, as numbers are consecutive in a backend's only group."""
    for before, each in pairwise(collectives):
        if each.key is None and before.key:
            backend, group, number = before.key
            each.key = backend, group, number + step
