"""Decide whether a failed job is restarted, and which hosts the restart avoids.  Pure."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from cpulaunch.cause import Kind
from cpulaunch.supervise.job import outcome as kinds
from cpulaunch.supervise.job.outcome import Failure, Outcome

ON_FAILURE, ON_ERROR, ON_NEVER = "failure", "error", "never"

LOST = "lost"  # the status of a rank whose host is lost

DIFFER = "its ranks make different calls; --restart-on error would restart it"
EXCEPTION = "its script raised an exception; --restart-on error would restart it"

TWICE = 2
"""The number of failures on a host after which the host is avoided."""

SHELLS_SIGNALS = range(128 + 1, 128 + 65)
"""Exit codes of a shell whose program was ended by a signal."""


class Rules(NamedTuple):
    """The rules for restarts, by the user's settings.

    ``max_restarts`` is the limit of restarts without progress.  ``on`` selects the causes (``ON_FAILURE``,
    ``ON_ERROR``, ``ON_NEVER``).  ``always``: restart even before the first step.  ``stalls``: restart after a
    stall, too.  ``python``: the program is a Python program.
    """

    max_restarts: int = 0
    on: str = ON_FAILURE
    always: bool = False
    stalls: bool = False
    python: bool = True


class Verdict(NamedTuple):
    """Whether to start the job ``again``.

    If not, ``why`` is the reason to show, if any.  ``avoid`` are hosts that the next attempt should avoid.
    On ``unusable`` hosts, no process can be started.
    """

    again: bool
    why: str = ""
    avoid: frozenset[str] = frozenset()
    unusable: frozenset[str] = frozenset()


class Restarts:
    """The restarts of one job.  ``count`` is their number, ``used`` the number since the last progress."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.count = self.used = 0
        self._furthest = 0  # the last step that any attempt has reached
        self._sees_steps = False  # whether any attempt has reported its steps
        self._failures: Counter[str] = Counter()
        self._lost: set[str] = set()

    def judge(self, outcome: Outcome) -> Verdict:
        """Decide what follows an attempt.  Call it once for each attempt, in order."""
        self._note_progress(outcome)
        self._note_hosts(outcome)
        if outcome.kind in (kinds.OK, kinds.INTERRUPTED):
            return Verdict(False)
        if self.rules.max_restarts == 0 or self.rules.on == ON_NEVER:
            return Verdict(False)
        if why := self._why_not(outcome):
            return Verdict(False, why)
        self.count, self.used = self.count + 1, self.used + 1
        twice = {host for host, times in self._failures.items() if times >= TWICE}
        failure = outcome.first_failure
        unusable = {failure.host} if failure and failure.host and outcome.kind == kinds.START_FAILED else ()
        return Verdict(True, "", frozenset(self._lost | twice), frozenset(unusable))

    @property
    def counted(self) -> str:
        """The number of this restart, in words."""
        allowed = self.rules.max_restarts
        if self.used == self.count:
            return f"restart {self.count} of {allowed}"
        return f"restart {self.count} ({self.used} of {allowed} since its last progress)"

    # ---- records of attempts

    def _note_progress(self, outcome: Outcome) -> None:
        reached = outcome.attempts[-1].reached
        if reached is None:
            return
        self._sees_steps = True
        if outcome.attempts[-1].steps and reached > self._furthest:
            self._furthest, self.used = reached, 0

    def _note_hosts(self, outcome: Outcome) -> None:
        failure = outcome.first_failure
        if outcome.kind == kinds.NODE_LOST:
            self._lost |= {rank.host for rank in outcome.ranks if rank.status == LOST}
        elif failure and failure.host and _may_be_hosts_fault(outcome.kind, failure):
            self._failures[failure.host] += 1

    # ---- reasons against a restart

    def _why_not(self, outcome: Outcome) -> str:
        if why := self._cause(outcome.kind, outcome.first_failure):
            return why
        if self._sees_steps and not self._furthest and not self.rules.always:
            return (
                "it failed before its first step, and may do so each time; watch.restart_always restarts it"
            )
        if self.used >= self.rules.max_restarts:
            allowed = self.rules.max_restarts
            return f"it was restarted {allowed} time{'s' if allowed > 1 else ''} without getting further"
        return ""

    def _cause(self, kind: str, failure: Failure | None) -> str:
        """Say why the failure's cause rules out a restart; empty if it doesn't."""
        if kind == kinds.STALLED:
            return "" if self.rules.stalls else "--stall-action abort ends a stalled job for good"
        if kind == kinds.START_FAILED:
            return "" if self.count else "it has never started, and the next start would fail, too"
        if failure is None:
            return "its ranks were not watched"
        if failure.cause.kind is Kind.USAGE_ERROR:
            return "the same error would occur again"
        if kind == kinds.NODE_LOST or self.rules.on == ON_ERROR:
            return ""
        if failure.cause.differ:
            return DIFFER
        if kind == kinds.SIGNAL:
            return ""
        if kind == kinds.ERROR:
            return "" if _is_network(failure) else EXCEPTION
        shells = not self.rules.python and failure.exit_code in SHELLS_SIGNALS
        if failure.cause.kind is Kind.UNEXPLAINED_EXIT or shells:
            return ""
        return f"a rank exited with code {failure.exit_code}; --restart-on error would restart the job"


def _may_be_hosts_fault(kind: str, failure: Failure) -> bool:
    """Whether the host may have caused the failure."""
    if kind == kinds.SIGNAL:
        return failure.cause.kind not in (Kind.LAUNCHER_KILLED, Kind.CANCELLED)
    return kind in (kinds.EXIT, kinds.STALLED)


def _is_network(failure: Failure) -> bool:
    """Whether connections failed, and no other rank had ended before."""
    return failure.cause.is_consequence and failure.note is None and failure.advice is None
