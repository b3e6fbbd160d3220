"""Restarts of a job: the rules as a table, and real jobs that fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.command import TIMEOUT
from support.jobs import outcome, run_changed
from support.marks import repeat

from cpulaunch.cause import Cause, Kind
from cpulaunch.supervise.job import outcome as kinds
from cpulaunch.supervise.job.outcome import AttemptOutcome, Failure, Outcome, RankOutcome
from cpulaunch.supervise.job.restarts import Restarts, Rules
from cpulaunch.supervise.job.status import Up, status_line
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.output.lines import Output
from cpulaunch.supervise.output.terminal import Screen

ENTRY = "from cpulaunch.cli.main import entry; entry()"
PEER_GONE = Cause(Kind.PEER_GONE)


def ended(
    kind: str, steps: int | None = 7, resumed_from: int | None = None, lost: str = "", **failure: Any
) -> Outcome:
    """Return an attempt on the hosts a and b that ended in this way; ``lost`` is a lost host."""
    first = None if kind == kinds.OK else Failure(0, failure.pop("host", "a"), **failure)
    status = {"a": "ended by launcher", "b": "ended by launcher", lost: "lost"}
    ranks = tuple(RankOutcome(n, host, 1, "0", status[host]) for n, host in enumerate("ab"))
    attempt = AttemptOutcome(kind, 1.0, ("a", "b"), resumed_from, steps)
    return Outcome(1, kind, 1.0, first, ranks, attempts=(attempt,))


KILLED: dict[str, Any] = {"kind": kinds.SIGNAL, "signal": 9}
RAISED: dict[str, Any] = {"kind": kinds.ERROR, "error": "ValueError: x"}


@pytest.mark.parametrize(
    ("attempt", "rules", "why_not"),
    [
        (KILLED, {}, None),
        (KILLED, {"max_restarts": 0}, ""),
        (KILLED, {"on": "never"}, ""),
        (KILLED | {"steps": 0}, {}, "before its first step"),
        (KILLED | {"steps": 0}, {"always": True}, None),
        (KILLED | {"steps": 0, "resumed_from": 300}, {}, "before its first step"),
        (KILLED | {"steps": None}, {}, None),
        ({"kind": kinds.NODE_LOST, "lost": "b"}, {}, None),
        (RAISED, {}, "--restart-on error"),
        (KILLED | {"cause": Cause(Kind.CALLS_DIFFER, signal=6)}, {}, "make different calls"),
        (KILLED | {"cause": Cause(Kind.CALLS_DIFFER, signal=6)}, {"on": "error"}, None),
        (RAISED, {"on": "error"}, None),
        (RAISED | {"cause": Cause(Kind.USAGE_ERROR)}, {"on": "error"}, "would occur again"),
        (RAISED | {"cause": PEER_GONE}, {}, None),
        (RAISED | {"cause": PEER_GONE, "note": "rank 1 had exited with code 0"}, {}, "--restart-on error"),
        ({"kind": kinds.EXIT, "exit_code": 3}, {}, "exited with code 3"),
        ({"kind": kinds.EXIT, "exit_code": 3}, {"on": "error"}, None),
        ({"kind": kinds.EXIT, "exit_code": 3, "cause": Cause(Kind.UNEXPLAINED_EXIT)}, {}, None),
        ({"kind": kinds.EXIT, "exit_code": 137}, {}, "exited with code 137"),
        ({"kind": kinds.EXIT, "exit_code": 137}, {"python": False}, None),
        ({"kind": kinds.STALLED}, {}, "--stall-action abort"),
        ({"kind": kinds.STALLED}, {"stalls": True}, None),
        ({"kind": kinds.START_FAILED, "steps": None}, {}, "never started"),
        ({"kind": kinds.INTERRUPTED}, {"on": "error"}, ""),
        ({"kind": kinds.OK}, {}, ""),
    ],
)
def test_causes_that_allow_a_restart(
    attempt: dict[str, Any], rules: dict[str, Any], why_not: str | None
) -> None:
    verdict = Restarts(Rules(**{"max_restarts": 1, **rules})).judge(ended(**attempt))
    assert verdict.again == (why_not is None)
    assert bool(verdict.why) == bool(why_not)
    assert (why_not or "") in verdict.why


@pytest.mark.parametrize(
    ("reached", "restarts"),
    [
        # (resumed from, steps) of each attempt.  All attempts end by a signal, and one restart is allowed.
        ([(None, 5), (None, 5)], 1),
        ([(None, 5), (None, 6), (None, 6)], 2),
        ([(None, 5), (3, 4), (6, 2), (6, 2)], 3),
        ([(None, 5), (5, 0), (5, 9)], 1),
        ([(None, None), (None, None)], 1),
    ],
)
def test_restarts_are_allowed_again_if_a_job_gets_further(
    reached: list[tuple[int | None, int | None]], restarts: int
) -> None:
    rules = Restarts(Rules(max_restarts=1))
    for resumed_from, steps in reached:
        if not rules.judge(ended(**KILLED, steps=steps, resumed_from=resumed_from)).again:
            break
    assert rules.count == restarts


def test_a_host_that_is_lost_or_fails_twice_is_avoided() -> None:
    rules = Restarts(Rules(max_restarts=9))
    assert rules.judge(ended(**KILLED)).avoid == set()
    assert rules.judge(ended(**KILLED, host="b")).avoid == set()
    assert rules.judge(ended(**KILLED, cause=Cause(Kind.LAUNCHER_KILLED))).avoid == set()
    assert rules.judge(ended(**KILLED)).avoid == {"a"}
    assert rules.judge(ended(kinds.NODE_LOST, lost="b")).avoid == {"a", "b"}
    failed = rules.judge(ended(kinds.START_FAILED, host="b"))
    assert (failed.again, failed.unusable) == (True, {"b"})


def test_the_status_line_has_the_number_of_restarts() -> None:
    assert status_line(Up(["a"]), 3.0, 2, 0, None) == "cpulaunch: 0 of 1 ranks up · 3 s · restart 2"


def test_the_launchers_log_marks_restarts(tmp_path: Path) -> None:
    directory = JobDirectory.make(tmp_path / "runs" / "x")
    output = Output(directory, frozenset(), Screen(status=False), print)
    for number, said in enumerate((b"first\n", b"", b"second\n", b"third\n")):
        output.restart(number // 2, frozenset())
        output.log_launcher(said) if said else None
    output.logs.close(TIMEOUT)
    log = directory.path / "launcher.log"
    assert (
        log.read_text()
        == "first\n\n==== cpulaunch: restart 1 ====\nsecond\n\n==== cpulaunch: restart 1 ====\nthird\n"
    )
    assert log.stat().st_mode & 0o077 == 0


# ---- real jobs

COMMANDS = ("command.sh", "command-1.sh", "command-2.sh")

# Each attempt makes the number of steps, and ends in the way, that its word in the file states.
TRAIN = """
import os, psutil, signal, subprocess, sys, time
from cpulaunch import ledger
from cpulaunch.runtime.reports import resumed_from, saved
rank, attempt = int(os.environ["RANK"]), int(os.environ["CPULAUNCH_RESTART_COUNT"])
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(attempt)
print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
steps, how = open("attempts").read().split()[attempt].split(":")
known = 0 if how == "mpiexec" else int(steps)
header = ledger.MAGIC, ledger.HAS_OPTIMIZER, known, 0, time.monotonic_ns(), 0, 0
ledger.PROGRESS.pack_into(ledger.of_this_process, 0, *header)
if attempt:
    resumed_from(1)
if how == "mpiexec" and rank == 0:
    saved(int(steps))
    above = psutil.Process().parents()
    next(each for each in above if each.name().startswith("mpiexec")).kill()
if how == "signal" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while how == "jobs" and rank == 0:
    said = subprocess.run([sys.executable, "-m", "cpulaunch", "jobs", "runs"], stdout=subprocess.PIPE, text=True).stdout
    if "2 ranks" in said:
        print(said, flush=True)
        break
while how not in ("end", "jobs"):
    time.sleep(60)
"""

# cpulaunch, changed to get a signal from the user while it plans another attempt.
INTERRUPTED = """
import os, signal
from cpulaunch.cli.run import replan
from cpulaunch.cli.main import entry

plan = replan.Replanner.__call__

def interrupt(self, without):
    os.kill(os.getpid(), signal.SIG{name})
    return plan(self, without)

replan.Replanner.__call__ = interrupt
entry()
"""


class Fall:
    """Runs jobs of two ranks whose attempts end as stated in ``attempts``, STEPS:HOW for each."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        self.directory, self._env = directory, env

    def __call__(
        self, attempts: str, *options: str, code: int = 0, cpulaunch: str = ENTRY
    ) -> tuple[list[str], dict[str, Any]]:
        """Run a job; return the launcher's lines about restarts, and outcome.json."""
        (self.directory / "attempts").write_text(attempts)
        (self.directory / "train.py").write_text(TRAIN)
        shared = ("run", "-n", "2", "--tee", "all", "--grace-period", "1", "--max-restarts", "1")
        done = run_changed(cpulaunch, *shared, *options, "train.py", directory=self.directory, env=self._env)
        assert done.returncode == code, done.stderr
        self.stdout, self.stderr = done.stdout, done.stderr
        lines = [line.removeprefix("cpulaunch: ") for line in done.stderr.splitlines()]
        said = ("rank ", "restart ", "the job ", "no progress")
        return [line for line in lines if line.startswith(said)], outcome(self.directory)

    def file(self, name: str) -> Path:
        """Return the path of a file in the job's directory."""
        (directory,) = self.directory.glob("runs/*")
        return directory / name


@pytest.fixture
def fall(marked: dict[str, str], tmp_path: Path) -> Fall:
    return Fall(tmp_path, marked)


def test_a_failing_job_is_restarted_as_often_as_allowed(fall: Fall) -> None:
    """The second attempt gets further than the first, so the job may restart again.  The third doesn't."""
    told, result = fall("2:signal 2:signal 2:signal", code=137)
    first, restart, second, again, refused = told
    assert first.startswith("rank 1 on localhost got SIGKILL")
    assert (", at step 2" in first, ", at step 3" in second) == (True, True), told
    assert restart == "restart 1 of 1: 2 ranks on this machine (plan-1.json)"
    assert again == "restart 2 (1 of 1 since its last progress): 2 ranks on this machine (plan-2.json)"
    assert refused == "the job is not started again: it was restarted 1 time without getting further"
    assert (result["kind"], result["restarts"], result["first_failure"]["signal"]) == ("signal", 2, 9)
    attempts = [(a["kind"], a["resumed_from"], a["steps"], a["hosts"]) for a in result["attempts"]]
    here = ["localhost"]
    assert attempts == [("signal", None, 2, here), ("signal", 1, 2, here), ("signal", 1, 2, here)]
    log = fall.file("rank-1.log").read_text()
    assert log.startswith("attempt 0 of 1\n\n==== cpulaunch: restart 1 ====\nattempt 1 of 1\n")
    assert fall.file("events.jsonl").read_text().count('"type":"restart"') == 2
    assert fall.file("plan-2.json").exists()
    ports = [re.search("MASTER_PORT=([0-9]+)", fall.file(name).read_text()) for name in COMMANDS]
    assert len({port and port[1] for port in ports}) == 3


@pytest.mark.repeats
def test_a_saved_state_counts_as_a_step_although_agents_ended_with_mpiexec(fall: Fall) -> None:
    told, result = fall("10:mpiexec 1:end", "--launcher", "mpirun", "--mpi", "intel")
    assert ", at step 10" in told[0], told
    assert result["restarts"] == 1


@pytest.mark.slow
def test_a_restarted_job_may_succeed(fall: Fall) -> None:
    told, result = fall("1:signal 1:jobs")
    assert len(told) == 2
    assert " · 1 restart · " in fall.stdout
    assert (result["kind"], result["restarts"], result["exit_code"]) == ("ok", 1, 0)


@pytest.mark.slow
def test_a_stalled_job_is_restarted(fall: Fall) -> None:
    told, result = fall("1:stall 1:end", "--stall-timeout", "1", "--stall-action", "restart")
    assert any(line.startswith("restart 1 of 1") for line in told)
    assert [attempt["kind"] for attempt in result["attempts"]] == ["stalled", "ok"]
    assert len(result["stalls"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [repeat("INT", 130), ("TERM", 143)])
def test_a_signal_between_two_attempts_ends_the_job(fall: Fall, name: str, code: int) -> None:
    told, result = fall("1:signal 1:end", code=code, cpulaunch=INTERRUPTED.format(name=name))
    assert len(told) == 1
    assert (result["kind"], result["restarts"], result["exit_code"]) == ("interrupted", 0, code)
