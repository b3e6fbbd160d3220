"""The cause among several failures."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.command import REPOSITORY

from cpulaunch.cause import EXCEPTION, Cause, Kind
from cpulaunch.ledger import COMPLETED, STARTED
from cpulaunch.messages import Failure as Raised
from cpulaunch.supervise.job.causes import Candidate, cause_of, root_cause
from cpulaunch.supervise.job.outcome import Failure
from cpulaunch.supervise.job.sentences import _SENTENCES

GONE, DIFFER = Cause(Kind.PEER_GONE), Cause(Kind.CALLS_DIFFER, rank=0, host="a")
HEARD = DIFFER._replace(finder=3)

USERS = '  File "/home/me/train.py", line 7, in upload\n    put(file)\n'
TORCHS = (
    '  File "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 5, in barrier\n'
)
REQUESTS = '  File "/venv/lib/python3.12/site-packages/requests/adapters.py", line 700, in send\n'


def raised(error: str, traceback: str = USERS, state: int | None = None, **cause: Any) -> Raised:
    """Return the report of an exception; with ``state``, the ledger has an operation."""
    groups = [] if state is None else [{"name": "0", "operations": [{"sequence": 1, "state": state}]}]
    return Raised(error, "train.py", 7, traceback, "", cause or None, 1.0, False, groups)


def failed(
    rank: int, at: float, cause: Cause = EXCEPTION, signal: int | None = None, by_signal: bool = False
) -> Candidate:
    return Candidate(at, "error", 1, Failure(rank, "a", signal=signal, cause=cause), by_signal)


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:14554.",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes",
        "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients",
        "torch.distributed.DistBackendError: ccl: all_reduce number 7 failed",
    ],
)
def test_errors_of_torch_and_gloo_about_lost_peers_are_recognized(error: str) -> None:
    assert cause_of(raised(error)).kind is Kind.PEER_GONE


UPLOAD = "requests.exceptions.ConnectionError: HTTPSConnectionPool: [Errno 111] Connection refused"


@pytest.mark.parametrize(
    ("error", "traceback", "state", "kind"),
    [
        (UPLOAD, USERS, None, Kind.EXCEPTION),
        (UPLOAD, USERS + REQUESTS, COMPLETED, Kind.EXCEPTION),
        (UPLOAD, TORCHS + REQUESTS, COMPLETED, Kind.EXCEPTION),
        ("RuntimeError: Connection reset by peer", USERS, COMPLETED, Kind.EXCEPTION),
        ("RuntimeError: Connection reset by peer", USERS + TORCHS, COMPLETED, Kind.PEER_GONE),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", USERS, STARTED, Kind.PEER_GONE),
        ("BrokenPipeError: [Errno 32] Broken pipe", USERS, STARTED, Kind.PEER_GONE),
        ("ValueError: no such luck", USERS + TORCHS, STARTED, Kind.EXCEPTION),
        ("RuntimeError: DataLoader worker is killed by signal: Killed.", TORCHS, None, Kind.EXCEPTION),
    ],
)
def test_other_errors_of_connections_are_about_a_peer_only_of_torch_or_within_an_operation(
    error: str, traceback: str, state: int | None, kind: Kind
) -> None:
    assert cause_of(raised(error, traceback, state)).kind is kind


def test_the_cause_that_a_program_reports_counts_and_its_text_does_not() -> None:
    found = cause_of(
        raised("torch.distributed.DistBackendError: …", kind="sizes_differ", rank=3, sizes=[44, 40])
    )
    assert found == Cause(Kind.SIZES_DIFFER, rank=3, sizes=(44, 40))
    assert not found.is_consequence


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"kind": "what is that"}, None),
        ({"rank": 1}, None),
        ({"kind": "peer_ended", "rank": "1", "host": 7, "sizes": [1]}, Cause(Kind.PEER_ENDED)),
        ({"kind": "peer_ended", "rank": True, "more": 1}, Cause(Kind.PEER_ENDED)),
    ],
)
def test_an_invalid_cause_is_ignored(said: dict[str, Any], found: Cause | None) -> None:
    assert Cause.from_document(said) == found


def test_every_kind_is_documented() -> None:
    docs = (REPOSITORY / "docs/reliability.md").read_text().partition("## Causes")[2]
    assert [kind.value for kind in Kind if f"`{kind.value}`" not in docs] == []


def test_every_kind_is_worded_in_one_place() -> None:
    """``ccl`` words its own kinds for its exceptions, and the launcher the others.

    Some kinds need no sentence.
    """
    source = REPOSITORY / "cpulaunch/ccl/csrc/core"
    names = (source / "cause.hpp").read_text().partition("kCauseNames[] = {")[2].partition("}")[0]
    of_ccl = set(re.findall(r'"(\w+)"', names)) - {"none"}
    assert of_ccl
    here = {kind.value for kind in _SENTENCES}
    own_words = {"exception", "usage_error", "exit", "signal", "peer_gone"}
    assert sorted([*of_ccl, *here, *own_words]) == sorted(kind.value for kind in Kind)


def test_every_cause_round_trips() -> None:
    for kind in Kind:
        cause = Cause(kind, 3, "a", 1, "all_reduce", 7, ("a", "b"), (1, 2), (0, 1), ("sum", "max"), 3.0)
        assert Cause.from_document(cause.document()) == cause


@pytest.mark.parametrize(
    ("candidates", "cause"),
    [
        ([failed(3, 1.0)], 3),
        ([failed(0, 2.0), failed(1, 1.0)], 1),
        ([failed(0, 1.0, GONE), failed(2, 1.4)], 2),
        ([failed(0, 1.0, GONE), failed(2, 1.4, Cause(Kind.SIGNAL), 9)], 2),
        ([failed(1, 1.0, HEARD), failed(3, 1.1, DIFFER)], 3),
        ([failed(1, 1.0, HEARD), failed(0, 1.1, GONE)], 1),
        ([failed(0, 1.2, GONE), failed(1, 1.1, GONE)], 1),
        ([failed(0, 1.0, signal=15, by_signal=True), failed(1, 1.1, signal=9)], 1),
        ([failed(0, 1.0, signal=15, by_signal=True)], 0),
    ],
)
def test_the_cause_is_the_earliest_failure_that_is_not_a_consequence(
    candidates: list[Candidate], cause: int
) -> None:
    found = root_cause(candidates, [])
    assert found
    assert found.failure.rank == cause


def test_without_a_failure_there_is_no_cause() -> None:
    assert root_cause([], [(1.0, 0)]) is None


def test_if_all_failures_are_consequences_the_ended_ranks_are_named() -> None:
    found = root_cause([failed(0, 5.0, GONE)], [(6.0, 1), (3.5, 2), (4.0, 3)])
    assert found
    assert found.failure.note == "ranks 2-3 had exited with code 0, 1.5 s earlier"
    assert found.failure.ranks == (2, 3)
    found = root_cause([failed(0, 5.0, GONE)], [(4.99, 1)])
    assert found
    assert found.failure.note == "rank 1 had exited with code 0, just before"
    found = root_cause([failed(0, 5.0, GONE)], [(5.4, 1)])  # its connections were closed before it was over
    assert found
    assert found.failure.note == "rank 1 had exited with code 0, just before"
    found = root_cause([failed(0, 5.0)], [(3.5, 2)])
    assert found
    assert found.failure.note is None
