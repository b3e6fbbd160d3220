"""Pieces of messages that many modules say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """``"1 rank"``, ``"2 ranks"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shortened(names: Sequence[str]) -> str:
    """Up to four of ``names``, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` where one of ``valid`` is close to ``word``, else ``""``."""
    import difflib  # only errors need it, and the agent wants to start quickly

    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
