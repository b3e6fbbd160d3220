"""What a launcher knows of one rank, and how that rank failed, if it did."""

from __future__ import annotations

from dataclasses import dataclass

from cpulaunch.messages import Message
from cpulaunch.supervise import outcome as kinds
from cpulaunch.supervise.outcome import Failure
from cpulaunch.supervise.root_cause import Candidate


@dataclass
class Rank:
    """What is known of one rank.  ``clock`` is what to add to its host's time to get ours."""

    rank: int
    host: str
    heard_at: float | None = None
    clock: float = 0.0
    pid: int | None = None
    cores: str | None = None
    status: str = "not started"
    failure: Message | None = None
    end: Message | None = None
    verdict: Candidate | None = None
    over: bool = False
    goodbye: bool = False
    missed_at: float | None = None

    def candidate(self) -> Candidate | None:
        """How it failed by itself, if it did."""
        if self.verdict:
            return self.verdict
        said, end = self.failure or {}, self.end or {}
        code, number = end.get("code"), end.get("signal")
        of_itself = end and not end["told"]
        if said and not said["told"]:
            code = (128 + number if number else code or 1) if of_itself else 1
            failure = Failure(
                self.rank,
                self.host,
                exit_code=code,
                error=said.get("error"),
                file=said.get("file"),
                line=said.get("line"),
                traceback=said.get("traceback"),
            )
            return Candidate(said["at"] + self.clock, kinds.ERROR, code, failure)
        if of_itself and number is not None:
            failure = Failure(self.rank, self.host, signal=number, note=end["note"])
            return Candidate(end["at"] + self.clock, kinds.SIGNAL, 128 + number, failure, bool(end["asked"]))
        if of_itself and code:
            failure = Failure(self.rank, self.host, exit_code=code, note=end["note"])
            return Candidate(end["at"] + self.clock, kinds.EXIT, code, failure, bool(end["asked"]))
        return None
