"""Decide what follows an attempt, tell the user, and plan the next attempt."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cpulaunch.launchers.command import Command, shell
from cpulaunch.model.hosts import fold_hosts
from cpulaunch.plan.plan import Plan
from cpulaunch.supervise.attempts.attempt import Attempt, next_attempt
from cpulaunch.supervise.attempts.execute import Ended
from cpulaunch.supervise.job.outcome import STALLED, Outcome
from cpulaunch.supervise.job.rank import LONG_WAIT
from cpulaunch.supervise.job.restarts import Restarts, Rules
from cpulaunch.supervise.job.status import duration
from cpulaunch.supervise.output.lines import Console, shown_ranks
from cpulaunch.supervise.stalls.progress import RESTART
from cpulaunch.wording import counted, shown_path


class Without(NamedTuple):
    """Hosts to leave out of a plan: ``avoid`` if possible, ``unusable`` always.

    ``unusable`` maps hosts to reasons.
    """

    avoid: frozenset[str]
    unusable: dict[str, str]


class Planned(NamedTuple):
    """A plan for another attempt.

    ``document`` is the plan's text for the job's directory.  ``free_port`` is a free port on its first host;
    None if not known.
    """

    plan: Plan
    commands: Sequence[Command]
    document: str
    free_port: int | None = None


Replan = Callable[[Without], Planned]
"""Plans the job again, on hosts that are ready.  Raises CpulaunchError."""


class Following:
    """Decides what follows each attempt of a job.  An instance is a ``Decide`` callable."""

    def __init__(self, plan: Plan, replan: Replan, console: Console) -> None:
        self._restarts = Restarts(restart_rules(plan))
        self._replan, self._console = replan, console
        self._unswept: dict[str, str] = {}  # hosts on which processes may be left → reason

    def __call__(self, ended: Ended) -> Attempt | None:
        """Return the next attempt, or None if there is none.  Raises CpulaunchError."""
        outcome, previous = ended.outcome, ended.attempt
        verdict = self._restarts.judge(outcome)
        if not verdict.again:
            if verdict.why:
                self._console.tell(f"the job is not started again: {verdict.why}")
            return None
        self._console.tell(describe_attempt(outcome))
        self._unswept |= {left.host: left.why for left in ended.unswept}
        unusable = self._unswept | dict.fromkeys(verdict.unusable, "nothing could be started there")
        began = time.monotonic()
        planned = self._replan(Without(verdict.avoid, unusable))
        took = time.monotonic() - began
        following = next_attempt(previous, planned.plan, planned.commands, planned.free_port)
        asked = f" after {took:.0f} s of asking hosts" if took > LONG_WAIT else ""
        self._announce(previous.plan, following, planned.document, outcome.seconds, asked)
        return following

    def _announce(self, before: Plan, following: Attempt, document: str, seconds: float, asked: str) -> None:
        number, plan, output = following.restart_count, following.plan, self._console.output
        name = f"plan-{number}.json"
        output.logs.append(name, document.encode(), private=True)
        script = shell(following.commands, following.master_port)
        output.logs.append(f"command-{number}.sh", os.fsencode(script), private=True)
        hosts = [host.host for host in plan.hosts]
        event = {"seconds": round(seconds, 3), "type": "restart", "restart": number, "hosts": hosts}
        output.logs.append("events.jsonl", json.dumps(event, separators=(",", ":")).encode() + b"\n")
        shown = shown_ranks(plan.settings.output.tee, plan.world_size, strict=False)
        output.restart(number, shown)
        gone = [host.host for host in before.hosts if host.host not in hosts]
        new = [host for host in hosts if host not in {host.host for host in before.hosts}]
        where = "this machine" if plan.here_alone else fold_hosts(hosts)
        change = f", without {fold_hosts(gone)}" if gone else ""
        change += f", with {fold_hosts(new)}" if new else ""
        ranks = counted(plan.world_size, "rank")
        self._console.tell(f"{self._restarts.counted}: {ranks} on {where}{change} ({name}){asked}")


def restart_rules(plan: Plan) -> Rules:
    watch = plan.settings.watch
    return Rules(
        max_restarts=watch.max_restarts,
        on=watch.restart_on,
        always=watch.restart_always,
        stalls=watch.stall_action == RESTART,
        python=plan.program.python,
    )


def describe_attempt(outcome: Outcome) -> str:
    """Return a line on how an attempt failed, and on its last step."""
    attempt = outcome.attempts[-1]
    when = f"after {duration(attempt.seconds if attempt.ended_after is None else attempt.ended_after)}"
    if attempt.reached is not None:
        when += f", at step {attempt.reached}"
    if attempt.waited:
        when += f"; then {', '.join(attempt.waited)}"
    failure = outcome.first_failure
    if failure is None:
        return f"it failed {when}"
    # If the text is about other ranks, ``file`` is not their place in the code.
    is_its_place = outcome.kind == STALLED or not failure.text
    place = f", at {shown_path(failure.file)}:{failure.line}" if failure.file and is_its_place else ""
    return f"{failure.in_a_line(outcome.kind)}{place} ({when})"
