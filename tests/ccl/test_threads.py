"""In ranks with several threads, all threads copy and sum while one waits for a collective."""

from __future__ import annotations

import os
from collections.abc import Iterator

import programs_names as names
import pytest
from programs_threads import BYTES
from ranks import Ranks, run_script

from cpulaunch.ccl.installed import Built

CORES = sorted(os.sched_getaffinity(0))[:2]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


@pytest.fixture(scope="module")
def ranks_of_two(built: Built) -> Iterator[Ranks]:
    """Two ranks with two threads each, which are made to believe that each has two cores."""
    ranks = Ranks(2, OMP_NUM_THREADS="2", OMP_WAIT_POLICY="passive", PRETENDED_CORES="2")
    yield ranks
    assert ranks.close() == [0, 0]


@pytest.fixture(scope="module")
def ranks_of_two_cores(built: Built) -> Iterator[Ranks]:
    """Two ranks with one thread each.  Both have the same two cores for communication."""
    if len(CORES) < 2:
        pytest.skip("needs two cores")
    ranks = Ranks(2, CCL_WORKER_COUNT="2", CCL_WORKER_AFFINITY=",".join(map(str, 2 * CORES)),
                  CPULAUNCH_RANK_CCL_TRANSPORT="tcp")  # fmt: skip
    yield ranks
    assert ranks.close() == [0, 0]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_share_the_work_of_a_collective(
    two: Ranks, ranks_of_two: Ranks, kind: str, asynchronous: bool
) -> None:
    """The shares of asynchronous collectives aren't checked, because a background thread may do a part."""
    alone = two.call("moved", kind)
    shared = ranks_of_two.call("moved", kind, asynchronous=asynchronous)
    for (copied, summed, result), (all_copied, all_summed, expected) in zip(shared, alone, strict=True):
        assert result == expected
        if not asynchronous:
            assert 0.45 * all_copied <= copied <= 0.55 * all_copied
            assert 0.45 * all_summed <= summed <= 0.55 * all_summed


@pytest.mark.parametrize("kind", KINDS)
def test_communication_cores_share_the_work_equally(two: Ranks, ranks_of_two_cores: Ranks, kind: str) -> None:
    """Both cores' threads do the same if the first thread moves half of the bytes."""
    for rank, (*wholes, expected) in enumerate(two.call("moved", kind)):
        by_caller, by_first, result = ranks_of_two_cores.call("moved_in_background", kind, rank)[rank]
        assert result == expected
        for whole, callers, firsts in zip(wholes, by_caller, by_first, strict=True):
            assert 0.9 * (whole - callers) <= 2 * firsts <= 1.1 * (whole - callers)
    threads = [["cpulaunch-ccl", str(CORES[0])], ["cpulaunch-copy", str(CORES[1])]]
    assert ranks_of_two_cores.call("cores_of_threads") == [threads, threads]


CONNECTIONS = """
import os, psutil, torch, torch.distributed as dist
from cpulaunch.ccl import meeting
rank = int(os.environ["RANK"])
meeting._host = lambda: f"host {{rank}}"
os.environ["CCL_WORKER_COUNT"] = "{counts}"[rank]
dist.init_process_group("ccl")
store = int(os.environ["MASTER_PORT"])
def count():
    ends = [(each.laddr, each.raddr) for each in psutil.Process().net_connections("tcp")]
    return sum(all(end.port != store for end in pair if end) for pair in ends)
small, large = torch.ones(1), torch.ones(1 << 20)
dist.all_reduce(small)
before = count()
dist.all_reduce(large)
print(count() - before, int(large.sum()))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("counts", "connections"), [("22", 2), ("21", 0)])
def test_ranks_agree_on_the_least_number_of_connections(built: Built, counts: str, connections: int) -> None:
    """A large tensor opens a second connection in each direction."""
    variables = {"CCL_WORKER_AFFINITY": "0,1", "CPULAUNCH_RANK_CCL_TRANSPORT": "tcp"}
    for rank in run_script(2, CONNECTIONS.format(counts=counts), **variables):
        assert (rank.returncode, rank.stdout) == (0, f"{connections} {2 << 20}\n"), rank.stderr


def test_ranks_move_the_bytes_that_the_page_on_ccl_states(two: Ranks) -> None:
    for copied, summed, _ in two.call("moved", "all_reduce"):
        assert (copied, summed) == (1.5 * BYTES, BYTES)
    for copied, summed, _ in two.call("moved", "all_reduce", in_shared_memory=True):
        assert (copied, summed) == (0.5 * BYTES, BYTES)


def test_tensors_in_shared_memory_are_summed_by_all_threads(two: Ranks, ranks_of_two: Ranks) -> None:
    alone = two.call("moved", "all_reduce", in_shared_memory=True)
    shared = ranks_of_two.call("moved", "all_reduce", in_shared_memory=True)
    for (copied, summed, result), (all_copied, all_summed, expected) in zip(shared, alone, strict=True):
        assert result == expected
        assert 0.45 * (all_copied + all_summed) <= copied + summed <= 0.55 * (all_copied + all_summed)


@pytest.mark.parametrize("kind", names.REDUCTIONS)
@pytest.mark.parametrize("late", [False, True])
def test_reductions_of_ranks_with_threads_equal_gloos(ranks_of_two: Ranks, kind: str, late: bool) -> None:
    for dtype in ("float32", "bfloat16", "int64"):
        ranks_of_two.call("reduction", kind, "SUM", dtype, [1_000_003], "plain", 1, 5, late)


@pytest.mark.parametrize("kind", names.MOVEMENTS)
def test_movements_of_ranks_with_threads_deliver_the_senders_values(ranks_of_two: Ranks, kind: str) -> None:
    ranks_of_two.call("movement", kind, "float32", [1_000_003], "plain", 1, 5, False)


def test_threads_without_their_own_core_stay_idle(built: Built, two: Ranks) -> None:
    """If a rank has more threads than cores, a single thread does all the work."""
    ranks = Ranks(2, OMP_NUM_THREADS="2", OMP_WAIT_POLICY="passive", PRETENDED_CORES="1")
    try:
        assert ranks.call("moved", "all_reduce") == two.call("moved", "all_reduce")
    finally:
        assert ranks.close() == [0, 0]


def test_background_threads_start_no_openmp_threads(built: Built) -> None:
    ranks = Ranks(2, OMP_NUM_THREADS="4", OMP_WAIT_POLICY="passive")
    try:
        assert max(ranks.call("background_threads")) <= 2  # one moves data, and one completes operations
    finally:
        assert ranks.close() == [0, 0]


def test_waiting_restores_the_threads_timer_slack(two: Ranks) -> None:
    for before, after in two.call("timer_slack"):
        assert before == after
