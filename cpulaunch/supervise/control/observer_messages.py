"""What an observer of a running job, such as ``cpulaunch stacks``, and its launcher say to each other.

An observer connects to the port of the agents, and answers the ``Challenge`` by ``Observe``; the launcher
answers by ``Welcome``, and from then on each question.  Agents don't know these messages, as they would have
to import them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cpulaunch.messages import Challenge, Unknown, Welcome
from cpulaunch.wire import decode, encode, proof

OBSERVER, LAUNCHER = "observer", "launcher of observers"
"""The roles in the proofs of both."""


class Observe(NamedTuple):
    """Who connects to ask about the job.  The launcher proves itself by ``salt``."""

    version: int
    salt: str
    proof: str


class AskStatus(NamedTuple):
    """How far is the job?"""


class AskStacks(NamedTuple):
    """What are all ranks doing?  ``native``: show frames of C and C++, too."""

    native: bool


class AskProfile(NamedTuple):
    """Trace so many steps of these ranks, or of all where none is named."""

    steps: int
    ranks: list[int]


class Status(NamedTuple):
    """How far the job is.

    ``seconds`` are those since its start, ``restarts`` those in them.  ``steps`` and ``collectives`` are
    those of the rank that has done most; their rates are per second, and None where nothing is known of them.
    ``stalled`` says in what the job hangs, if it does.  ``rates`` are those that its programs have stated, in
    words.
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


class RankSeen(NamedTuple):
    """What one rank is doing, as its ``Dump`` says.

    ``error`` says what could not be seen; ``processes`` are None where the rank hasn't answered, or has
    ``left``, which says how.
    """

    rank: int
    host: str
    processes: list[dict[str, Any]] | None
    error: str = ""
    left: str = ""


class AllSeen(NamedTuple):
    """There is no ``RankSeen`` of a further rank."""


class ProfileProgress(NamedTuple):
    """How far a trace is, in words, or none: it goes on."""

    text: str


class Profiled(NamedTuple):
    """The trace is in this ``file`` of the job's directory, and says so.  ``error``: why there is none."""

    file: str
    text: str
    error: str


Question = Observe | AskStatus | AskStacks | AskProfile
Answer = Status | RankSeen | AllSeen | ProfileProgress | Profiled

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
    "rank_seen": RankSeen,
    "all_seen": AllSeen,
    "profile_progress": ProfileProgress,
    "profiled": Profiled,
}
_KINDS = {cls: kind for kinds in (FROM_OBSERVER, FOR_OBSERVER) for kind, cls in kinds.items()}


def written(message: Question | Answer | Challenge | Welcome) -> bytes:
    """One of these messages, as a line."""
    return encode(message, _KINDS)


def question(line: bytes) -> Question | Unknown:
    """What an observer says.  Raises MessageError."""
    return decode(line, FROM_OBSERVER)


def answer(line: bytes) -> Challenge | Welcome | Answer | Unknown:
    """What a launcher says to an observer.  Raises MessageError."""
    return decode(line, FOR_OBSERVER)


def proof_of(role: str, token: str, salt: str) -> str:
    """That whoever has this ``role`` knows the ``token``, which is ``wire.observers_token``."""
    return proof(token, role, salt, 0)
