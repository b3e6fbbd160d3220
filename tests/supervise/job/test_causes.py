"""Which of several failures is the cause."""

from __future__ import annotations

import pytest

from cpulaunch.supervise.job.causes import Candidate, is_consequence, root_cause
from cpulaunch.supervise.job.outcome import Failure

GLOO = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:14554."

CANNOT_COMPLETE = "DistBackendError: rank 1: broadcast of group '0' of 4 ranks cannot complete: "
CALLS_OTHER = "all_reduce (sequence number 2) failed: rank 0 on a calls broadcast, this rank all_reduce"


def failed(
    rank: int, at: float, error: str | None = None, signal: int | None = None, by_signal: bool = False
) -> Candidate:
    return Candidate(at, "error", 1, Failure(rank, "a", signal=signal, error=error), by_signal)


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (GLOO, True),
        ("RuntimeError: [pair.cc:446] Connection reset by peer", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("BrokenPipeError: [Errno 32] Broken pipe", True),
        ("torch.distributed.DistNetworkError: Failed to recv, got 0 bytes", True),
        ("torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients", True),
        ("torch.distributed.DistBackendError: ccl: all_reduce number 7 failed", True),
        ("RuntimeError: ccl: rank 1 has ended", True),
        ("RuntimeError: ccl: the connection to rank 1 on node-1.c is lost: reset", True),
        ("ValueError: no such luck", False),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'shard-1.npz'", False),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", False),
        (None, False),
        (
            "torch.distributed.DistBackendError: rank 0: all_to_all_single of group '0' of 4 ranks failed: rank 3 "
            "sends 44 bytes to this rank, which expects 40",
            False,
        ),
        (
            "torch.distributed.DistBackendError: rank 1: recv of group '0' of 2 ranks failed: rank 0 sends 40 bytes to this rank, which expects 80; "
            "the group's store cannot be reached: the process that holds it, usually rank 0, has ended",
            False,
        ),
    ],
)
def test_what_is_a_consequence(error: str | None, consequence: bool) -> None:
    assert is_consequence(error) is consequence


@pytest.mark.parametrize(
    ("candidates", "cause"),
    [
        ([failed(3, 1.0, "ValueError: x")], 3),
        ([failed(0, 2.0, "ValueError: x"), failed(1, 1.0, "KeyError: y")], 1),
        ([failed(0, 1.0, GLOO), failed(2, 1.4, "ValueError: x")], 2),
        ([failed(0, 1.0, GLOO), failed(2, 1.4, None, 9)], 2),
        (
            [
                failed(1, 1.0, f"{CANNOT_COMPLETE}rank 3 on b failed: {CALLS_OTHER}"),
                failed(3, 1.1, CALLS_OTHER),
            ],
            3,
        ),
        ([failed(1, 1.0, f"{CANNOT_COMPLETE}rank 3 on b failed: {CALLS_OTHER}"), failed(0, 1.1, GLOO)], 1),
        ([failed(0, 1.2, GLOO), failed(1, 1.1, GLOO)], 1),
        ([failed(0, 1.0, None, 15, by_signal=True), failed(1, 1.1, None, 9)], 1),
        ([failed(0, 1.0, None, 15, by_signal=True)], 0),
    ],
)
def test_the_cause_is_the_earliest_that_is_no_consequence(candidates: list[Candidate], cause: int) -> None:
    found = root_cause(candidates, [])
    assert found
    assert found.failure.rank == cause


def test_without_a_failure_there_is_no_cause() -> None:
    assert root_cause([], [(1.0, 0)]) is None


def test_consequences_alone_name_those_who_left_before() -> None:
    found = root_cause([failed(0, 5.0, GLOO)], [(6.0, 1), (3.5, 2), (4.0, 3)])
    assert found
    assert found.failure.note == "ranks 2-3 had exited with code 0, 1.5 s earlier"
    assert found.failure.ranks == (2, 3)
    found = root_cause([failed(0, 5.0, GLOO)], [(4.99, 1)])
    assert found
    assert found.failure.note == "rank 1 had exited with code 0, just before"
    found = root_cause([failed(0, 5.0, GLOO)], [(5.4, 1)])  # its connections were closed before it was over
    assert found
    assert found.failure.note == "rank 1 had exited with code 0, just before"
    found = root_cause([failed(0, 5.0, "ValueError: x")], [(3.5, 2)])
    assert found
    assert found.failure.note is None
