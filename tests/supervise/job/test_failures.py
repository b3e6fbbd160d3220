"""Every row of the table in docs/reliability.md, with a fake clock.  In each, rank 2 or its host fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from signal import SIGABRT, SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM
from typing import Any

import pytest
from support.played import GLOO, SILENCE, SSH, Played, running

from cpulaunch import messages
from cpulaunch.supervise.job.events import Write
from cpulaunch.supervise.job.outcome import ERROR, EXIT, NODE_LOST, SIGNAL, STALLED, START_FAILED, Failure
from cpulaunch.supervise.output.record import why_failed

LOST = "torch.distributed.DistBackendError: all_reduce of rank 0 of 4 cannot complete: host node2 (rank 2) has given no sign of life for 15 s"
CCL = "torch.distributed.DistBackendError: ccl: all_reduce number 7 failed"
NO_PYTHON = (
    "[proxy:2@node2] HYDU_create_process (launch.c:73): execvp error on file /v/python (No such file)\n"
)
INTEL_SAYS = "[mpiexec@login] Error: Unable to run bstrap_proxy on node2 (pid 26, exit code 32512)\n"


def raises_alone() -> Played:
    """The others sleep or compute, so no other rank notices."""
    job = running()
    job.raises(2, "ValueError: no such luck")
    job.obeys(0, 1, 3)
    job.exits(2, 1)
    return job


def raises_in_collective(consequence: str) -> Callable[[], Played]:
    """The others fail as a consequence, and their reports may arrive first."""

    def play() -> Played:
        job = running(ahead=(0.0, 5.0, -3.0, 0.0))
        job.until(3.0)
        own = "ValueError: no such luck"
        cause = messages.Failure(own, "train.py", 5, "T", "", None, job.clock(2), False, [])
        job.until(3.1)
        job.raises(0, consequence)
        job.raises(1, consequence)
        job.says(2, cause)
        job.raises(3, consequence, by_launcher=True)
        job.exits(0, 1)
        job.exits(1, 1)
        job.exits(2, 1)
        job.exits(3, 1, by_launcher=True)
        return job

    return play


def exits_with_5() -> Played:
    job = running()
    job.exits(2, 5)
    job.obeys(0, 1, 3)
    return job


def leaves_while_others_wait() -> Played:
    job = running()
    job.exits(2, 0)
    job.until(2.8)
    for rank in (0, 1, 3):
        job.raises(rank, GLOO)
    for rank in (0, 1, 3):
        job.exits(rank, 1)
    return job


def dies_of(number: int, cause: dict[str, Any] | None = None, consequence: str = "") -> Callable[[], Played]:
    def play() -> Played:
        job = running()
        if consequence:
            at = job.clock(2)
            job.until(2.1)
            job.raises(0, consequence)
            job.exits(2, None, int(number), at=at, cause=cause)
            job.exits(0, 1)
            job.obeys(1, 3)
        else:
            job.exits(2, None, int(number), cause=cause)
            job.obeys(0, 1, 3)
        return job

    return play


def agent_is_killed() -> Played:
    job = running()
    job.disconnects(2)
    job.obeys(0, 1, 3)
    return job


def all_fail_at_once() -> Played:
    """Rank 2 fails first, although its clock is ahead and its report arrives last."""
    job = running(ahead=(0.0, 0.0, 100.0, 0.0))
    failures = {}
    for rank, at in ((2, 2.00), (0, 2.02), (3, 2.04), (1, 2.06)):
        job.until(at)
        failures[rank] = messages.Failure(
            f"ValueError: {rank}", None, None, "T", "", None, job.clock(rank), False, []
        )
    for rank in (0, 1, 3, 2):
        job.says(rank, failures[rank])
    for rank in (0, 1, 3, 2):
        job.exits(rank, 1)
    return job


def host_falls_silent() -> Played:
    """The host's link is cut, or its packets are dropped, so the end of the connection isn't seen."""
    job = running()
    job.falls_silent(2)
    job.until(2.0 + SILENCE + 1.1)
    job.obeys(0, 1, 3)
    job.to_the_end()
    return job


def group_loses_host_first() -> Played:
    """The host's link is cut for a while.  The other ranks' ccl group gives the host up, but the host is back
    before the launcher gives it up."""
    job = running()
    job.falls_silent(2)
    job.until(6.0)
    job.raises(0, LOST, cause={"kind": "host_silent", "host": "node2"})
    job.beating.add(2)
    job.obeys(0, 1, 3)
    job.to_the_end()
    return job


def host_cannot_be_reached(text: str, launcher: str = "mpich") -> Callable[[], Played]:
    """With ssh, or with mpiexec, which then waits forever."""

    def play() -> Played:
        job = Played(launcher=launcher)
        job.starts(0, 1, 3)
        job.until(4.0)
        job.process_says(text)
        job.obeys(0, 1, 3)
        job.process_ends(255)
        job.to_the_end()
        return job

    return play


def intel_says_nothing_but_the_host() -> Played:
    job = Played()
    job.until(0.5)
    job.process_says(INTEL_SAYS)
    job.until(1.0)
    job.process_ends(255)
    job.to_the_end()
    return job


def user_sends(number: int) -> Callable[[], Played]:
    def play() -> Played:
        job = running()
        job.user_sends(number)
        for rank in range(4):
            assert [end.signal for _, end in job.sent(rank, messages.End)] == [number]
            job.exits(rank, None, int(number), by_launcher=True)
        return job

    return play


KILL = {"kind": "killed_by_others", "memory": 1.5}
NOT_OOM = "not out of memory (peak 1.50 GiB)"
ROWS = [
    # name, event, kind, exit code, and sentence of the first failure
    ("raises while the others sleep, or compute", raises_alone, "error", 1, "ValueError: no such luck"),
    ("raises while the others wait (gloo)", raises_in_collective(GLOO), "error", 1, "ValueError: no such luck"),
    ("raises while the others wait (ccl)", raises_in_collective(CCL), "error", 1, "ValueError: no such luck"),
    ("exits with 5", exits_with_5, "exit", 5, ""),
    ("is killed", dies_of(SIGKILL, KILL), "signal", 137, NOT_OOM),
    ("is killed while the others wait (gloo)", dies_of(SIGKILL, KILL, GLOO), "signal", 137, NOT_OOM),
    ("is killed while the others wait (ccl)", dies_of(SIGKILL, KILL, CCL), "signal", 137, NOT_OOM),
    ("segfaults", dies_of(SIGSEGV), "signal", 139, ""),
    ("aborts", dies_of(SIGABRT), "signal", 134, ""),
    ("loses its agent", agent_is_killed, "signal", 137, "its agent ended without a report"),
    ("all fail at once", all_fail_at_once, "error", 1, "ValueError: 2"),
    ("link cut, packets dropped", host_falls_silent, "node_lost", 4, "no sign of life from host node2 for 9 s"),
    ("link cut for a while", group_loses_host_first, "node_lost", 4, "no sign of life from host node2 for"),
    ("packets dropped at start", host_cannot_be_reached(SSH), "start_failed", 3, "on node2: Connection timed out"),
    ("Python missing", host_cannot_be_reached(NO_PYTHON), "start_failed", 3, "on node2: /v/python (No such file)"),
    ("Python missing (Intel)", intel_says_nothing_but_the_host, "start_failed", 3, "on node2: Unable to run"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("play", "kind", "code", "said"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_a_row_of_the_table(play: Callable[[], Played], kind: str, code: int, said: str) -> None:
    outcome = play().outcome()
    assert (outcome.kind, outcome.exit_code) == (kind, code)
    first = outcome.first_failure
    assert first
    assert (first.rank, first.host) == (2, "node2")
    text = (first.error or "") + (first.note or "")
    assert bool(said) is bool(text)
    assert said in text
    assert first.signal == (code - 128 if kind == "signal" else None)
    assert (outcome.ranks[2].status == "not started") is (kind == "start_failed")


def test_a_rank_that_exits_with_0_while_others_wait_is_named() -> None:
    outcome = leaves_while_others_wait().outcome()
    first = outcome.first_failure
    assert first
    assert (outcome.kind, outcome.exit_code, first.rank, first.error) == ("error", 1, 0, GLOO)
    assert first.note == "rank 2 had exited with code 0, 0.8 s earlier"
    assert [rank.status for rank in outcome.ranks] == ["exit 1", "exit 1", "exit 0", "exit 1"]


@pytest.mark.parametrize(("number", "code"), [(SIGINT, 130), (SIGTERM, 143), (SIGHUP, 129)])
def test_a_users_signal_ends_the_job_without_blame(number: int, code: int) -> None:
    job = user_sends(number)()
    outcome = job.outcome()
    assert (outcome.kind, outcome.exit_code, outcome.first_failure) == ("interrupted", code, None)
    assert job.told == [
        f"{number.name}: ending all ranks, 1.0 s at most; send it again to kill them now"  # type: ignore[attr-defined]
    ]
    assert set(job.statuses()) == {"ended by launcher"}


def test_a_job_whose_ranks_succeed_succeeds() -> None:
    job = running()
    job.says(1, messages.Output(1, "hello"))
    for rank in range(4):
        assert not job.state.finished
        job.exits(rank, 0)
    outcome = job.outcome()
    assert (outcome.kind, outcome.exit_code, outcome.first_failure) == ("ok", 0, None)
    assert [(rank.pid, rank.cores, rank.status) for rank in outcome.ranks] == [
        (100 + rank, str(rank), "exit 0") for rank in range(4)
    ]
    assert [action for _, action in job.of(Write)] == [Write(1, 1, b"hello")]
    assert job.state.untidy == []


@pytest.mark.parametrize(
    ("failure", "kind", "line"),
    [
        (Failure(3, "b", error="ValueError: x", file="/a.py", line=1), ERROR, "rank 3 on b: ValueError: x"),
        (Failure(3, "b", exit_code=2), EXIT, "rank 3 on b ended with exit code 2"),
        (Failure(3, "b", signal=9), SIGNAL, "rank 3 on b got SIGKILL"),
        (
            Failure(3, "b", signal=9, error="its agent ended without a report", note="out of memory"),
            SIGNAL,
            "rank 3 on b got SIGKILL: its agent ended without a report: out of memory",
        ),
        (Failure(3, "b", error="E", text="ranks disagree", note="0: x\n1: y", disagree=True), ERROR,
         "ranks disagree: 0: x; 1: y"),
        (Failure(3, "b", error="no progress for 3 s: rank 3 on b is at f"), STALLED,
         "no progress for 3 s: rank 3 on b is at f"),
        (Failure(error="it couldn't be started"), START_FAILED, "it couldn't be started"),
        (Failure(host="b", error="gone"), NODE_LOST, "host b: gone"),
        (Failure(), ERROR, "it failed"),
    ],
)  # fmt: skip
def test_the_line_about_a_failure_is_the_same_when_made_from_the_jobs_record(
    failure: Failure, kind: str, line: str
) -> None:
    assert failure.in_a_line(kind) == line
    assert why_failed({"kind": kind, "first_failure": asdict(failure)}) == line
