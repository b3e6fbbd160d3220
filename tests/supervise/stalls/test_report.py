"""From the ranks' observed states to the reason for a stall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.seen import LOAD, MAIN, NOW, TORCH, explained, group, operation, others, process, seen, thread

from cpulaunch.ledger import MEETING, NEW_GROUP
from cpulaunch.messages import Dump
from cpulaunch.model.cores import CoreSet
from cpulaunch.supervise.stalls.report import describe_calls, explain
from cpulaunch.supervise.stalls.snapshot import Snapshot


def test_a_rank_that_has_not_called_the_collective_is_named_with_its_line() -> None:
    late = seen(3, [group(3, operation(6, done=93))], process(LOAD, MAIN))
    found = explained(*others(3), late)
    assert found.headline == "rank 3 on node1 has not called all_reduce #7"
    assert found.lines == (
        "all others wait in all_reduce #7 of group 0, 25 MB float32, at train.py:91 main",
        "rank 3 on node1 finished #6 93 s ago and is at train.py:88 load_batch",
    )
    assert (found.ranks, found.operation, found.sequence) == ((3,), "all_reduce", 7)


def test_the_reason_for_the_missing_rank_comes_first() -> None:
    stopped = process(LOAD, state="T", stopped_by="SIGSTOP")
    found = explained(*others(1), seen(1, [group(1, operation(6, done=93))], stopped))
    assert found.headline == "rank 1 on node1: stopped (SIGSTOP)"
    assert "finished #6 93 s ago" in found.lines[1]


def test_a_rank_that_waits_alone_is_named_if_the_others_have_continued() -> None:
    alone = seen(0, [group(0, operation(6, done=94), operation(7, "barrier", bytes=0))])
    rest = [seen(rank, [group(rank, operation(6, done=94))], process(LOAD, MAIN)) for rank in (1, 2, 3)]
    found = explained(alone, *rest)
    assert found.headline == "rank 0 on node0 waits in barrier #7, which 3 ranks have not called"
    assert found.ranks == (1, 2, 3)


def test_an_ended_rank_is_named() -> None:
    found = explained(*others(2), seen(2, left="exit 0"))
    assert found.headline == "rank 2 on node0 has left (exit 0) without calling all_reduce #7"
    assert found.ranks == (2,)


@pytest.mark.parametrize("left", [(), (group(2, operation(7, done=50)),)], ids=["unknown", "known"])
def test_an_ended_rank_that_may_have_called_it_is_not_named_if_another_is_late(
    left: Sequence[dict[str, Any]],
) -> None:
    gone = replace(seen(2, left, left="exit 0"), dump=Dump(1, NOW, list(left), [], "") if left else None)
    found = explained(*others(1, 2), gone, seen(1, [group(1, operation(6, done=93))], process(LOAD, MAIN)))
    assert found.headline == "rank 1 on node1 has not called all_reduce #7"
    assert not any("rank 2" in line for line in found.lines)
    assert (found.ranks, found.certain) == ((1,), False)


def test_an_ended_rank_that_had_not_called_it_is_named_although_another_is_late() -> None:
    dump = Dump(1, NOW, [group(2, operation(6, done=50))], [], "")
    late = seen(1, [group(1, operation(6, done=93))], process(LOAD, MAIN))
    found = explained(*others(1, 2), late, replace(seen(2, left="exit 0"), dump=dump))
    assert found.headline == "rank 2 on node0 has left (exit 0) without calling all_reduce #7"


def test_a_rank_whose_agent_is_silent_is_named() -> None:
    found = explained(*others(2), Snapshot(2, "node0"))
    assert found.headline == "rank 2 on node0 can't be seen; the others wait in all_reduce #7"
    assert "its agent has not answered" in found.lines[1]
    pair = {**group(0, operation(3), size=2, name="1"), "members": "0,2"}
    found = explained(seen(0, [pair]), seen(1, []), Snapshot(2, "node0"), seen(3, []))
    assert found.headline == "rank 2 on node0 can't be seen; rank 0 on node0 waits in all_reduce #3"


def test_different_operations_under_one_number_are_shown_with_both_lines() -> None:
    other = seen(1, [group(1, operation(6, done=94), operation(7, "broadcast"))], process(TORCH, LOAD))
    found = explained(*others(1), other)
    assert found.headline == "ranks make different calls as #7 of group 0"
    assert found.lines == (
        "ranks 0,2-3 on node[0-1]: all_reduce #7 of group 0, 25 MB float32, at train.py:91 main",
        "rank 1 on node1: broadcast #7 of group 0, 25 MB float32, at train.py:88 load_batch",
    )
    assert (found.ranks, found.mutual) == ((0, 1, 2, 3), True)  # it is unknown which one is wrong


def test_an_outdated_ledger_is_ignored() -> None:
    """With gloo, the ledger of a stopped rank has the call of operation #6, but not its completion."""
    stopped = seen(3, [group(3, operation(6))], process(LOAD, MAIN))
    waiting = [
        seen(rank, [group(rank, operation(6, done=93), operation(7))], process(TORCH, MAIN))
        for rank in range(3)
    ]
    found = explained(*waiting, stopped)
    assert found.headline == "rank 3 on node1 has not called all_reduce #7"
    assert found.lines[1] == "rank 3 on node1 called #6 93 s ago and is at train.py:88 load_batch"
    assert found.ranks == (3,)


def test_completion_with_another_root_does_not_count() -> None:
    """In gloo's ledgers, two ranks name different roots, and the third rank has continued."""
    roots = {0: 0, 1: 1}
    two = [seen(rank, [group(rank, operation(6, "broadcast", root=roots[rank]), size=3)]) for rank in roots]
    third = [operation(6, "broadcast", root=0, done=93), operation(7)]
    found = explained(*two, seen(2, [group(2, *third, size=3)]))
    assert found.headline == "ranks make different calls as #6 of group 0"
    assert (found.ranks, found.mutual) == ((0, 1, 2), True)


def test_the_first_differing_operations_are_shown() -> None:
    """Both roots have continued to the same operation, in which the mismatch is noticed."""
    ranks = [
        seen(rank, [group(rank, operation(6, "broadcast", root=rank, done=5), operation(7), size=2)])
        for rank in range(2)
    ]
    lines, _ = describe_calls(ranks, reported=True)
    assert [line.partition(", 25 MB")[0] for line in lines] == [
        f"rank {rank} on node{rank}: broadcast #6 from rank {rank} of group 0" for rank in range(2)
    ]


def test_a_rank_that_completed_another_operation_is_shown_too() -> None:
    """The root of a broadcast may complete it, as it doesn't wait for the others."""
    other = seen(1, [group(1, operation(7, "broadcast", done=93), operation(8))])
    assert explained(*others(1), other).headline == "ranks make different calls as #7 of group 0"


def test_differing_roots_are_shown_if_all_are_known() -> None:
    ranks = [
        seen(rank, [group(rank, operation(7, "broadcast", root=root))])
        for rank, root in enumerate((1, 0, 0, 0))
    ]
    assert (
        explained(*ranks).lines[1].startswith("rank 0 on node0: broadcast #7 from rank 1 of group 0, 25 MB")
    )
    same = [
        seen(rank, [group(rank, operation(7, "broadcast", root=root))]) for rank, root in enumerate((1, 1))
    ]
    assert "from" not in explained(*same).lines[0]


def test_differing_reductions_are_shown() -> None:
    ranks = [
        seen(rank, [group(rank, operation(7, reduction=reduction))])
        for rank, reduction in enumerate(("sum", "max", "sum", "sum"))
    ]
    assert [line.partition(" of ")[0] for line in explained(*ranks).lines] == [
        "ranks 0,2-3 on node[0-1]: all_reduce (sum) #7",
        "rank 1 on node1: all_reduce (max) #7",
    ]
    same = [seen(rank, [group(rank, operation(7, reduction="sum"))]) for rank in range(4)]
    assert "sum" not in explained(*same).lines[0]


def test_the_title_and_the_ranks_show_the_same_seconds() -> None:
    """Clocks and times of inspection differ by fractions of a second."""
    late = seen(3, [group(3, operation(6, done=93))], process(LOAD, MAIN))
    found = explain([*others(3), replace(late, now=NOW + 1.4)], 94.6)
    assert "finished #6 95 s ago" in found.lines[1]
    assert "finished #6 94 s ago" in explain([*others(3), replace(late, now=NOW + 1.4)], 7.0).lines[1]


def test_a_wait_for_a_message_from_any_rank_is_shown_with_the_others_places() -> None:
    """It is unknown which rank should send it."""
    waits = seen(1, [group(1, operation(0, "recv from any rank"))])
    found = explained(waits, *(seen(rank, [group(rank)], process(LOAD)) for rank in (0, 2)))
    assert found.headline == "no rank has sent what rank 1 on node1 waits for in recv from any rank #0"
    assert found.ranks == ()
    assert found.lines == (
        "rank 1 on node1 waits in recv from any rank #0 of group 0, 25 MB float32, at train.py:91 main",
        "rank 0 on node0 is at train.py:88 load_batch",
        "rank 2 on node0 is at train.py:88 load_batch",
    )


def test_ranks_of_a_gather_may_have_different_sizes() -> None:
    ranks = [seen(rank, [group(rank, operation(7, "gather", bytes=rank))]) for rank in range(4)]
    assert explained(*ranks).headline == "all have called gather #7, but it has not completed"


def test_crossed_groups_are_shown_with_both_lines() -> None:
    first, second = group(0, operation(3), size=2, name="1"), group(0, size=2, name="2")
    zero = seen(0, [first, second], process(TORCH, MAIN))
    one = seen(
        1, [group(1, size=2, name="1"), group(1, operation(5), size=2, name="2")], process(TORCH, LOAD)
    )
    found = explained(zero, one, seen(2, [], process(MAIN)))
    assert found.headline == "ranks 0-1 on node[0-1] wait for each other in different groups"
    assert found.lines == (
        "rank 0 on node0 waits for rank 1 in all_reduce #3 of group 1, 25 MB float32, at train.py:91 main",
        "rank 1 on node1 waits for rank 0 in all_reduce #5 of group 2, 25 MB float32, at train.py:88 load_batch",
    )


def test_a_chain_of_groups_leads_to_the_rank_that_computes() -> None:
    """Rank 0 waits for rank 1 in one group, and rank 1 for rank 2 in another."""
    zero = seen(0, [group(0, operation(3), size=2, name="1")])
    one = seen(1, [group(1, size=2, name="1"), group(0, operation(5), size=2, name="2")])
    two = seen(2, [group(1, size=2, name="2")], process(LOAD))
    assert explained(zero, one, two).headline == "rank 2 on node0 has not called all_reduce #5"


def test_a_group_that_expects_too_many_ranks_is_reported() -> None:
    meeting = [operation(0, MEETING, bytes=0, type="")]
    found = explained(*(seen(rank, [group(rank, *meeting, size=3, name="")]) for rank in range(2)))
    assert found.headline == "init_process_group expects 3 ranks, but this job has 2 ranks"
    assert (found.ranks, found.certain) == ((), False)  # ranks of other jobs may join it
    found = explained(seen(0, [group(0, *meeting, size=2, name="")]), seen(1), seen(2))
    assert found.headline == (
        "member 1 of the group of 2 can't be seen; rank 0 on node0 waits in init_process_group"
    )


def makes(rank: int, number: int, *operations: dict[str, Any], members: str = "0-3") -> Snapshot:
    """Return a rank that makes a group, and may also wait in group 0."""
    size = len(CoreSet.parse(members))
    new = group(number, operation(0, NEW_GROUP, bytes=0, type=""), size=size, name="1")
    return seen(
        rank, [{**new, "backend": "", "members": members}, group(rank, *operations)], process(LOAD, MAIN)
    )


def test_a_rank_that_makes_a_group_alone_is_shown_with_waiting_ranks() -> None:
    found = explained(*others(1), makes(1, 1, operation(6, done=93)))
    assert found.headline == ("rank 1 on node1 waits in new_group, ranks 0,2-3 on node[0-1] in all_reduce #7")
    assert found.lines == (
        "rank 1 on node1 waits in new_group of ranks 0-3, at train.py:88 load_batch",
        "ranks 0,2-3 on node[0-1] wait in all_reduce #7 of group 0, 25 MB float32, at train.py:91 main",
    )
    assert (found.ranks, found.certain, found.mutual) == ((0, 1, 2, 3), True, True)


def test_a_rank_missing_from_a_new_group_of_some_ranks_is_named() -> None:
    elsewhere = [seen(rank, [group(rank, operation(6, done=93))], process(LOAD, MAIN)) for rank in (0, 1, 2)]
    found = explained(*elsewhere, makes(3, 1, operation(6, done=93), members="2-3"))
    assert found.headline == "rank 2 on node0 has not called new_group"
    assert (found.ranks, found.operation) == ((2,), NEW_GROUP)


def test_a_rank_that_made_a_group_earlier_is_not_reported_missing() -> None:
    there = group(0, size=2, name="1")
    found = explained(
        seen(0, [there], process(LOAD, MAIN)),
        makes(1, 1, members="0-2"),
        seen(2, [group(2, size=3, name="0")], process(LOAD, MAIN)),
    )
    assert found.ranks == (2,)


def test_a_rank_that_makes_another_group_of_the_same_number_is_missing_from_this_group() -> None:
    found = explained(
        makes(0, 0, members="0,2"), makes(2, 0, members="2-3"), seen(1), seen(3, [], process(LOAD))
    )
    assert found.headline == "rank 3 on node1 has not called new_group"
    assert found.lines[0].startswith("rank 2 on node0 waits in new_group of ranks 2-3")


def test_ranks_at_the_same_line_are_reported_in_one_line() -> None:
    found = explained(*(seen(rank, [group(rank)], process(LOAD, MAIN)) for rank in range(2)))
    assert (found.ranks, found.place and found.place.line) == ((), 88)


def test_destroyed_groups_are_reported() -> None:
    ranks = [replace(seen(rank, [], process(LOAD, MAIN)), collectives=9) for rank in range(2)]
    assert explained(*ranks).lines[0] == "all ranks have destroyed their process groups, after 9 collectives"


def test_a_rank_without_the_group_has_left_it_only_if_the_group_was_in_use() -> None:
    stopped = process(LOAD, state="T", stopped_by="SIGSTOP")
    for number, program, words in (
        (0, process(LOAD), "has called nothing in group 0, as far as known,"),
        (1, stopped, "has called nothing in group 0, as far as known,"),
        (1, process(LOAD), "has left group 0"),
    ):
        waiting = [seen(rank, [group(rank, operation(number))]) for rank in range(3)]
        found = explained(*waiting, seen(3, [], program))
        assert found.lines[1].startswith(f"rank 3 on node1 {words} and is at train.py:88"), found.lines


def test_an_unanswered_message_names_the_peer() -> None:
    receiver = seen(0, [group(0, operation(1, "recv", peer=2))])
    found = explained(receiver, *(seen(rank, [group(rank)], process(LOAD)) for rank in (1, 2, 3)))
    assert found.headline == "rank 2 on node0 has not answered rank 0's recv #1 from rank 2"
    assert found.lines[0].startswith("rank 0 on node0 waits in recv #1 from rank 2")
    rest = [seen(rank, [group(rank)], process(LOAD)) for rank in (1, 3)]
    found = explained(receiver, *rest, seen(2, left="exit 0"))
    assert found.headline.endswith("has left (exit 0) without answering rank 0's recv #1 from rank 2")


def test_whether_an_unobserved_peer_has_answered_is_unknown() -> None:
    receiver = seen(0, [group(0, operation(1, "recv", peer=2))])
    found = explained(receiver, seen(1, [group(1)], process(LOAD)))
    assert found.headline.startswith("member 2 of group 0 can't be seen; rank 0 on node0 waits in recv #1")


def test_two_receiving_ranks_wait_for_each_other() -> None:
    zero = seen(0, [group(0, operation(1, "recv", peer=1), size=2)])
    one = seen(1, [group(1, operation(1, "recv", peer=0), size=2)])
    assert explained(zero, one).headline == "ranks 0-1 on node[0-1] wait for each other in messages"


def test_a_pending_receive_does_not_mean_that_the_missing_rank_waits() -> None:
    """A rank may have a receive pending all the time, and compute."""
    program = process(LOAD)
    program["threads"][0]["idle"] = False
    late = seen(3, [group(3, operation(6, done=93), operation(1, "recv", peer=0))], program)
    assert explained(*others(3), late).headline == "rank 3 on node1 has not called all_reduce #7"


def test_two_hosts_report_the_cut_network_between_them() -> None:
    waits_for = {0: "2", 1: "3", 2: "0", 3: "1"}
    names = ["node0", "node0", "node1", "node1"]
    ranks = [
        Snapshot(rank, names[rank], "", Dump(1, NOW, [group(rank, operation(7, waits_for=waits_for[rank]))], [process(MAIN)], ""))
        for rank in range(4)
    ]  # fmt: skip
    found = explained(*ranks)
    assert found.headline == "all_reduce #7 does not complete between node0 and node1"
    assert found.ranks == (0, 1, 2, 3)


def test_ranks_that_wait_for_waiting_ranks_are_not_named_as_the_pair() -> None:
    """The network is cut between hosts 1 and 3 of four.  Hosts 0 and 2 only wait for them."""
    waits_for = {0: "1", 1: "3", 2: "3", 3: "1"}
    ranks = [seen(rank, [group(rank, operation(7, waits_for=waits_for[rank]))], hosts=4) for rank in range(4)]
    found = explained(*ranks)
    assert found.headline == "all_reduce #7 does not complete between node1 and node3"
    assert found.ranks == (1, 3)


def test_a_rank_that_was_stopped_within_the_collective_is_named() -> None:
    stopped = seen(2, [group(2, operation(7))], process(TORCH, MAIN, state="T", stopped_by="SIGSTOP"))
    assert explained(*others(2), stopped).headline == "rank 2 on node0: stopped (SIGSTOP)"


def test_ranks_that_all_wait_for_input_are_reported() -> None:
    loader = ("_get_data", "/venv/lib/python3.12/site-packages/torch/utils/data/dataloader.py", 9)
    found = explained(*(seen(rank, [group(rank)], process(loader, MAIN)) for rank in range(4)))
    assert found.headline == "all ranks wait for input"
    assert (found.ranks, found.place and found.place.line) == ((), 91)


def test_a_deadlock_of_threads_is_named_with_their_lines() -> None:
    lock = ("PyThread_acquire_lock_timed", "libpython3.12.so", 0)
    program = process(MAIN)
    program["threads"] = [thread(lock, MAIN), thread(lock, LOAD, name="Thread-1")]
    found = explained(seen(0, [], program), *(seen(rank, [], process(MAIN)) for rank in (1, 2, 3)))
    assert found.headline == "threads of rank 0 on node0 wait for each other's locks"
    assert found.lines[1:] == (
        "  its thread MainThread waits for a lock at train.py:91 main",
        "  its thread Thread-1 waits for a lock at train.py:88 load_batch",
    )


@pytest.mark.parametrize("waiting", [1, 2])
def test_locks_that_another_thread_may_hold_are_not_a_deadlock(waiting: int) -> None:
    """The thread sleeps, or waits for the disk, and is shown beside the waiting threads."""
    lock = ("PyThread_acquire_lock_timed", "libpython3.12.so", 0)
    program = process(MAIN)
    program["threads"] = [
        *[thread(lock, MAIN), thread(lock, MAIN, name="tokenizer")][:waiting],
        {**thread(("clock_nanosleep", "libc.so.6", 0), LOAD, name="writer"), "idle": True},
    ]
    found = explained(seen(0, [], program), *(seen(rank, [], process(MAIN)) for rank in (1, 2, 3)))
    assert "each other" not in found.headline
    assert not found.certain
    assert "  its thread MainThread waits for a lock at train.py:91 main" in found.lines
    assert "  its thread writer is at train.py:88 load_batch" in found.lines


def test_threads_that_wait_in_queues_are_not_a_deadlock() -> None:
    lock = ("PyThread_acquire_lock_timed", "libpython3.12.so", 0)
    wait = ("wait", "/usr/lib/python3.12/threading.py", 355)
    program = process(MAIN)
    program["threads"] = [thread(lock, MAIN), thread(lock, wait, LOAD, name="Thread-1")]
    assert explained(seen(0, [], program)).headline == "rank 0 on node0 is at train.py:91 main"


def test_a_disk_that_hangs_is_named() -> None:
    blocked = [
        {"thread": 1, "name": "python", "wchan": "request_wait_answer", "call": "fsync", "file": "/mnt/x"}
    ]
    found = explained(
        *(seen(rank, [], process(MAIN, blocked=blocked if rank == 2 else [])) for rank in range(4))
    )
    assert found.headline == "rank 2 on node0: waits for a disk: fsync of /mnt/x"


def test_without_a_collective_all_places_are_shown() -> None:
    done = [[group(rank, operation(6, done=93))] for rank in range(4)]
    found = explained(*(seen(rank, done[rank], process(LOAD if rank == 1 else MAIN)) for rank in range(4)))
    assert found.headline == "no rank waits in a collective"
    assert (found.ranks, found.place, found.odd) == ((), None, (1,))


def test_without_a_ledger_no_rank_is_blamed() -> None:
    found = explained(*(seen(rank, [], process(LOAD if rank == 1 else MAIN)) for rank in range(4)))
    assert found.headline == "it is unknown what the ranks wait for"
    assert found.ranks == ()


def test_unknown_states_are_not_an_error() -> None:
    found = explained(*(Snapshot(rank, "node0") for rank in range(2)))
    assert found.headline == "it is unknown what the ranks wait for"


def test_differing_reductions_at_one_line_are_shown_with_this_line() -> None:
    ranks = [seen(rank, [group(rank, operation(7), size=2)]) for rank in range(2)]
    at = "ranks 0-1 on node[0-1]: all_reduce #7 of group 0, 25 MB float32, at train.py:91 main"
    assert describe_calls(ranks, reported=True)[0] == [at]
    assert describe_calls(ranks, reported=False) == ([], [])
