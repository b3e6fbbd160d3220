"""Ranks that report that they call different operations: both sides are shown (with a fake clock)."""

from __future__ import annotations

from typing import Any

import pytest
from support.played import Played, running

from cpulaunch.cause import Kind
from cpulaunch.ledger import COMPLETED, FAILED, STARTED
from cpulaunch.messages import AskDump, Dump, End
from cpulaunch.supervise.stalls.mismatch import WITHIN

ERROR, CALLS_DIFFER = "DistBackendError: …", {"kind": "calls_differ", "rank": 1}


def groups(
    rank: int, kind: str = "all_reduce", state: int = FAILED, backend: str = "ccl"
) -> list[dict[str, Any]]:
    """Return the groups of a ledger whose only operation is not completed."""
    operation = {
        "sequence": 3, "state": state, "kind": kind, "type": "float32", "bytes": 4000, "enqueued": 1.0,
        "started": 1.0, "completed": None, "peer": -1, "waits_for": "",
    }  # fmt: skip
    group = {"name": "0", "backend": backend, "size": 4, "rank": rank, "count": 4}
    return [{**group, "operations": [operation]}]


def differs() -> Played:
    """A job in which rank 0 has reported different calls, and the others were asked where they are."""
    job = running()
    job.raises(0, ERROR, cause=CALLS_DIFFER, groups=groups(0))
    assert all(job.sent(rank, AskDump) for rank in (1, 2, 3))
    return job


def dump(rank: int, kind: str = "all_reduce", state: int = STARTED, backend: str = "ccl") -> Dump:
    frames = [["step", "/home/me/train.py", 13]]
    main = {"id": 1, "name": "MainThread", "gil": False, "idle": True, "frames": frames, "left_out": 0}
    return Dump(1, 1.0, groups(rank, kind, state, backend), [{"pid": 9, "threads": [main]}], "")


def note(job: Played) -> list[str]:
    first = job.first_failure()
    return (first.note or "").splitlines()


def test_each_rank_reports_its_place_before_it_is_ended() -> None:
    job = differs()
    job.raises(1, ERROR, cause={**CALLS_DIFFER, "finder": 0}, groups=groups(1, "broadcast"), line=31)
    job.says(2, dump(2))
    assert not job.sent(2, End)
    job.says(3, dump(3))
    assert all(job.sent(rank, End) for rank in (1, 2, 3))
    assert not job.sent(0, End)  # the rank ends by itself
    job.exits(0, 1)
    job.exits(1, 1)
    job.obeys(2, 3)
    assert note(job) == [
        "ranks 2-3 on node[2-3]: all_reduce #3 of group 0, 4 kB float32, at train.py:13 step",
        "rank 0 on node0: all_reduce #3 of group 0, 4 kB float32, at train.py:5",
        "rank 1 on node1: broadcast #3 of group 0, 4 kB float32, at train.py:31",
    ]


@pytest.mark.parametrize("runs", [True, False])
def test_a_rank_with_a_completed_operation_is_shown_at_its_current_place(runs: bool) -> None:
    """The root of a broadcast doesn't wait for the others.  Once Python has ended, it has no line."""
    job = differs()
    its = dump(1, "broadcast", COMPLETED)
    job.says(1, its if runs else its._replace(processes=[{"pid": 9, "word": "running", "threads": []}]))
    for rank in (2, 3):
        job.says(rank, dump(rank))
    job.exits(0, 1)
    job.obeys(1, 2, 3)
    called = "rank 1 on node1: broadcast #3 of group 0, 4 kB float32, which is complete there"
    assert (f"{called}; now at train.py:13 step" if runs else called) in note(job)


def test_the_sender_of_a_part_of_another_size_is_shown_although_it_has_continued() -> None:
    """The part that the sender gets has the expected size."""
    job = running()
    cause = {"kind": "sizes_differ", "rank": 2, "sizes": [4400, 4000]}
    job.raises(0, ERROR, cause=cause, groups=groups(0, "all_to_all"))
    for rank in (1, 2, 3):
        gone_on = dump(rank, "all_to_all", COMPLETED)
        (operation,) = gone_on.groups[0]["operations"]
        later = {**operation, "sequence": 4, "kind": "all_reduce", "state": STARTED}
        operation["bytes"] += 400 * (rank == 2)
        gone_on.groups[0]["operations"].append(later)
        job.says(rank, gone_on)
    job.exits(0, 1)
    job.obeys(1, 2, 3)
    assert note(job) == [
        "rank 0 on node0: all_to_all #3 of group 0, 4 kB float32, at train.py:5",
        "rank 2 on node2: all_to_all #3 of group 0, 4.4 kB float32, which is complete there; now at train.py:13 step",
    ]


def test_an_error_raised_in_a_later_call_is_not_shown_at_a_line_of_the_earlier_call() -> None:
    job = running()
    called = groups(0)
    later = {**called[0]["operations"][0], "sequence": 4, "kind": "all_gather"}
    called[0]["operations"].append(later)
    job.raises(0, ERROR, cause=CALLS_DIFFER, groups=called, line=8)
    job.says(1, dump(1, "broadcast"))
    for rank in (2, 3):
        job.says(rank, dump(rank))
    job.exits(0, 1)
    job.obeys(1, 2, 3)
    assert (
        "rank 0 on node0: all_reduce #3 of group 0, 4 kB float32, called earlier; now at train.py:8"
        in note(job)
    )


def test_a_silent_rank_does_not_delay_the_others() -> None:
    job = differs()
    job.exits(0, 1)
    assert not job.sent(1, End)
    job.until(job.now + WITHIN)
    assert all(job.sent(rank, End) for rank in (1, 2, 3))
    job.obeys(1, 2, 3)
    assert note(job) == []


RESET = "RuntimeError: [gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1203: Connection reset by peer."


@pytest.mark.parametrize("size", [8000, 4000])
@pytest.mark.parametrize("abort_first", [False, True], ids=["error first", "abort first"])
def test_an_abort_by_gloo_is_explained_by_differing_sizes(size: int, abort_first: bool) -> None:
    """If the operations are the same, different lines explain nothing.

    The other ranks are asked in any case, whether the error or the abort is reported first.
    """
    job = running()
    aborted = groups(0, state=STARTED, backend="gloo")
    aborted[0]["operations"][0]["bytes"] = size
    if abort_first:
        job.exits(0, signal=6, groups=aborted)
    job.raises(1, RESET, groups=groups(1, backend="gloo"), line=5)
    job.says(2, dump(2, backend="gloo"))
    assert not job.sent(2, End)
    job.says(3, dump(3, backend="gloo"))
    if not abort_first:
        assert not job.sent(2, End)
        job.exits(0, signal=6, groups=aborted)
    assert all(job.sent(rank, End) for rank in (2, 3))
    job.exits(1, 1)
    job.obeys(2, 3)
    first = job.first_failure()
    assert (first.rank, first.signal) == (0, 6)
    sides = [
        "ranks 2-3 on node[2-3]: all_reduce #3 of group 0, 4 kB float32, at train.py:13 step",
        "rank 1 on node1: all_reduce #3 of group 0, 4 kB float32, at train.py:5",
        "rank 0 on node0: all_reduce #3 of group 0, 8 kB float32",
    ]
    assert note(job) == (sides if size == 8000 else [])
    assert (first.cause.kind, first.cause.signal) == (Kind.CALLS_DIFFER if size == 8000 else Kind.SIGNAL, 6)


def test_a_rank_that_has_left_the_group_is_named() -> None:
    """The rank has destroyed the group, but gloo only reports a lost connection."""
    job = running()
    job.raises(0, RESET, groups=groups(0, backend="gloo"))
    for rank in (2, 3):
        job.says(rank, dump(rank, backend="gloo"))
    job.says(1, dump(1)._replace(groups=[]))
    job.exits(0, 1)
    job.obeys(1, 2, 3)
    assert note(job) == [
        "rank 0 on node0: all_reduce #3 of group 0, 4 kB float32, at train.py:5",
        "rank 1 on node1 has left group 0 and is at train.py:13 step",
    ]


HAS_ENDED = {"kind": "peer_ended", "rank": 1}


def test_all_ranks_that_wait_for_an_ended_rank_are_named() -> None:
    """One of them raises an error before the others notice."""
    job = running()
    job.exits(1, 0)
    job.until(job.now + 2)
    job.raises(0, ERROR, cause=HAS_ENDED, groups=groups(0))
    assert not job.sent(2, End)
    for rank in (2, 3):
        job.says(rank, dump(rank))
    assert all(job.sent(rank, End) for rank in (2, 3))
    job.exits(0, 1)
    job.obeys(2, 3)
    first = job.first_failure()
    assert first.text == "rank 1 on node1 has left (exit 0) without calling all_reduce #3"
    assert note(job)[0].startswith("ranks 0,2-3 on node[0,2-3]: all_reduce #3 of group 0")


def test_a_rank_that_ended_after_the_call_is_not_the_cause() -> None:
    job = running()
    job.exits(1, 0, groups=groups(1, state=COMPLETED))
    job.until(job.now + 2)
    job.raises(0, ERROR, cause=HAS_ENDED, groups=groups(0))
    job.says(2, dump(2))
    late = dump(3, state=COMPLETED)
    late.groups[0]["operations"][0] |= {"sequence": 2, "completed": 0.5}
    job.says(3, late)
    job.exits(0, 1)
    job.obeys(2, 3)
    first = job.first_failure()
    assert (first.rank, first.ranks, first.text) == (0, (), "")
    assert note(job)[-2].startswith("rank 3 on node3 finished #2 ")
    assert note(job)[-1].startswith("rank 1 had exited with code 0, ")


TIMED_OUT = {"kind": "peer_late", "operation": "all_reduce", "timeout": 3.0}


GLOOS = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting 3000ms for recv operation to complete"
)


@pytest.mark.parametrize("backend", ["ccl", "gloo"])
def test_the_rank_that_caused_a_timeout_is_named_instead_of_the_waiting_rank(backend: str) -> None:
    job = running()
    error, cause = (ERROR, TIMED_OUT) if backend == "ccl" else (GLOOS, None)
    job.raises(0, error, cause=cause, groups=groups(0, backend=backend))
    for rank in (2, 3):
        job.says(rank, dump(rank, backend=backend))
    late = dump(1, state=COMPLETED, backend=backend)
    late.groups[0]["operations"][0] |= {"sequence": 2, "completed": 0.5}
    job.says(1, late)
    job.exits(0, 1)
    job.obeys(1, 2, 3)
    first = job.first_failure()
    assert (first.rank, first.ranks, first.disagree) == (0, (1,), False)
    assert first.text == "rank 1 on node1 has not called all_reduce #3"
    assert note(job)[-1].endswith("is at train.py:13 step")
    assert first.cause.kind is Kind.PEER_LATE
    assert (first.cause.operation, first.cause.timeout) == ("all_reduce", 3.0)


def pair(state: int = FAILED, kind: str = "all_reduce", rank: int = 0) -> dict[str, Any]:
    """Return the group of ranks 0 and 2, in its first operation."""
    its = groups(rank, kind, state)[0]
    its["operations"][0]["sequence"] = 0
    return {**its, "name": "1", "size": 2, "count": 2, "members": "0,2"}


def test_a_timeout_is_about_its_own_group() -> None:
    """This holds even if more ranks wait for the same late rank in another group."""
    job = running()
    job.raises(0, ERROR, cause=TIMED_OUT, groups=[*groups(0, state=COMPLETED), pair()])
    for rank in (1, 3):
        waits = dump(rank, "barrier")
        waits.groups[0]["operations"][0]["sequence"] = 4
        job.says(rank, waits)
    late = dump(2, state=COMPLETED)
    late.groups.append({**pair(rank=1), "operations": [], "count": 0})
    job.says(2, late)
    job.exits(0, 1)
    job.obeys(1, 2, 3)
    first = job.first_failure()
    assert first.text == "rank 2 on node2 has not called all_reduce #0"


def test_an_ended_rank_is_not_to_blame_for_a_group_without_it() -> None:
    job = running()
    job.exits(1, 0, groups=groups(1, state=COMPLETED))
    job.until(job.now + 2)
    job.raises(0, ERROR, cause=TIMED_OUT, groups=[*groups(0, state=COMPLETED), pair()])
    job.says(3, dump(3, state=COMPLETED))
    late = dump(2, state=COMPLETED)
    late.groups.append({**pair(rank=1), "operations": [], "count": 0})
    job.says(2, late)
    job.exits(0, 1)
    job.obeys(2, 3)
    first = job.first_failure()
    assert (first.text, first.ranks) == ("rank 2 on node2 has not called all_reduce #0", (2,))


def test_only_members_of_a_group_can_disagree() -> None:
    job = running()
    job.raises(0, ERROR, cause=CALLS_DIFFER, groups=[*groups(0, state=COMPLETED), pair()])
    for rank in (1, 3):
        job.says(rank, dump(rank, state=COMPLETED))
    late = dump(2, state=COMPLETED)
    late.groups.append(pair(STARTED, "broadcast", rank=1))
    job.says(2, late)
    job.exits(0, 1)
    job.obeys(1, 2, 3)
    first = job.first_failure()
    assert (first.disagree, first.ranks) == (True, (0, 2))


def test_an_abort_outside_collectives_does_not_delay_the_end() -> None:
    job = running()
    job.exits(0, signal=6, groups=groups(0, state=COMPLETED, backend="gloo"))
    assert all(job.sent(rank, End) for rank in (1, 2, 3))


def test_other_errors_end_all_at_once() -> None:
    job = running()
    job.raises(0, "ValueError: no such luck")
    assert all(job.sent(rank, End) for rank in (1, 2, 3))
    assert not job.sent(1, AskDump)


def test_an_aborted_operation_has_the_line_of_its_calling_thread() -> None:
    """The rank has reported the line just before.  DistributedDataParallel's backward pass calls from C++."""
    torch = "/venv/lib/python3.12/site-packages/torch/autograd/graph.py"
    main = {"id": 9, "name": "MainThread", "frames": [["join", "/home/me/train.py", 3]]}
    frames = [["_engine_run_backward", torch, 979], ["train", "/home/me/train.py", 40]]
    caller = {"id": 77, "name": "trainer", "frames": frames}
    aborted = groups(0, state=STARTED, backend="gloo")
    aborted[0]["operations"][0] |= {"bytes": 8000, "thread": 77}
    job = running()
    job.exits(0, signal=6, groups=aborted, threads=[main, caller])
    # gloo's ledger doesn't show the failure of an aborted operation.
    job.raises(1, RESET, groups=groups(1, state=COMPLETED, backend="gloo"), line=5)
    for rank in (2, 3):
        assert job.sent(rank, AskDump)
        job.says(rank, dump(rank, backend="gloo"))
    job.obeys(1, 2, 3)
    assert note(job) == [
        "ranks 2-3 on node[2-3]: all_reduce #3 of group 0, 4 kB float32, at train.py:13 step",
        "rank 1 on node1: all_reduce #3 of group 0, 4 kB float32, at train.py:5",
        "rank 0 on node0: all_reduce #3 of group 0, 8 kB float32, at train.py:40 train, in the backward pass, "
        "in its thread trainer",
    ]


def test_differing_roots_are_a_disagreement_even_at_the_same_line() -> None:
    job = differs()
    for rank in (1, 2, 3):
        job.says(rank, dump(rank))
    job.exits(0, 1)
    job.obeys(1, 2, 3)
    first = job.first_failure()
    assert first.disagree
