"""Messages between the launcher of a running job and an observer, such as ``cpulaunch stacks``.

An observer connects to the port of the agents and answers the ``Challenge`` with ``Observe``.  The launcher
replies with ``Welcome``, and then answers questions.  These messages have a module of their own, so that
agents need not import them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cpulaunch.messages import Challenge, Welcome

OBSERVER, LAUNCHER = "observer", "launcher of observers"
"""Names of the two ends in their proofs of `wire.observers_token`.  Both ends use the rank 0."""


class Observe(NamedTuple):
    """The observer's handshake.

    ``proof`` uses the salt of the ``Challenge``.  The proof in the launcher's ``Welcome`` uses ``salt``.
    """

    version: int
    salt: str
    proof: str


class AskStatus(NamedTuple):
    """Ask for the state and progress of the job."""


class AskStacks(NamedTuple):
    """Ask for the stacks of all ranks.  ``native``: with frames of C and C++."""

    native: bool


class AskProfile(NamedTuple):
    """Ask for a trace of the next ``steps`` of these ``ranks``, or of all ranks if the list is empty."""

    steps: int
    ranks: list[int]


class Status(NamedTuple):
    """State and progress of a job.

    ``hosts``, ``ranks`` and ``running`` are numbers of hosts, of ranks, and of running ranks.  ``seconds``
    and ``restarts`` count from the start of the job.  ``steps`` and ``collectives`` are those of the rank
    that is furthest ahead; their rates are per second, and None if unknown.  ``stalled`` says where the job
    hangs, or is empty.  ``rates`` are the rates that its programs have printed, in words.
    """

    state: str
    hosts: int
    ranks: int
    running: int
    seconds: float
    restarts: int
    steps: int
    collectives: int
    step_rate: float | None
    collective_rate: float | None
    stalled: str
    rates: str


class RankStacks(NamedTuple):
    """The stacks of one rank, from its ``Dump``.

    ``processes`` is None if the rank has not answered or has ended.  ``error`` says what could not be read.
    ``left`` says how the rank has ended, or is empty if it still runs.
    """

    rank: int
    host: str
    processes: list[dict[str, Any]] | None
    error: str = ""
    left: str = ""


class StacksEnd(NamedTuple):
    """The end of a series of ``RankStacks``."""


class ProfileProgress(NamedTuple):
    """Progress of a trace, in words.  ``text`` is empty if there is no news."""

    text: str


class Profiled(NamedTuple):
    """The end of a trace.

    ``file`` is the name of the trace in the job's directory, and ``text`` its summary.  If there is no trace,
    ``error`` says why.
    """

    file: str
    text: str
    error: str


Question = Observe | AskStatus | AskStacks | AskProfile
Answer = Status | RankStacks | StacksEnd | ProfileProgress | Profiled

FROM_OBSERVER: Mapping[str, type[Question]] = {
    "observe": Observe,
    "ask_status": AskStatus,
    "ask_stacks": AskStacks,
    "ask_profile": AskProfile,
}
FOR_OBSERVER: Mapping[str, type[Challenge | Welcome | Answer]] = {
    "challenge": Challenge,
    "welcome": Welcome,
    "status": Status,
    "rank_seen": RankStacks,
    "all_seen": StacksEnd,
    "profile_progress": ProfileProgress,
    "profiled": Profiled,
}
KINDS = {cls: kind for kinds in (FROM_OBSERVER, FOR_OBSERVER) for kind, cls in kinds.items()}
