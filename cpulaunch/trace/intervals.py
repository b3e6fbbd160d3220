"""Sets of times: sorted lists of disjoint intervals (begin, end)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Intervals = list[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the times in any of ``intervals``, which may overlap and be unsorted."""
    found: Intervals = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = found[-1][0], end
        elif end > begin:
            found.append((begin, end))
    return found


def intersect(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> Intervals:
    """Return the times in both ``a`` and ``b``."""
    found: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> Intervals:
    """Return the times in ``a`` that are not in ``b``."""
    found: Intervals = []
    j = 0
    for begin, end in a:
        while j < len(b) and b[j][1] <= begin:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > begin:
                found.append((begin, b[k][0]))
            begin = max(begin, b[k][1])
            k += 1
        if begin < end:
            found.append((begin, end))
    return found


def total(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the sum of the lengths."""
    return sum(end - begin for begin, end in intervals)
