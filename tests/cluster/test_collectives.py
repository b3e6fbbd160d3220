"""All collectives on several hosts with one to three ranks each have the right results, and leave nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence

import pytest
from ccl import programs_names as names
from ccl.ranks import WORKER, Ranks
from support.faults import Cluster
from support.marks import repeat
from support.ranks import OVER_LIBFABRIC, PORT, hosts_of, started_ranks

from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

LAYOUTS = {
    "2x1": hosts_of("2x1"),
    "2x2": hosts_of("2x2"),
    "3+1": hosts_of("3+1"),
    "4x2": hosts_of("4x2"),
    "1+2+1, in turn": ["node0", "node1", "node2", "node1"],
}
LIFE = 1800.0  # seconds: ranks that share a fixture's last layout stay until the module's tests are over
# Rank 1 can't read the memory of a process with more privileges (ptrace(2), "access mode checking").
UNPRIVILEGED = ["sh", "-c", '[ $RANK = 1 ] && exec setpriv --bounding-set=-all -- "$@"; exec "$@"', "sh"]


def ranks_on(
    cluster: Cluster, hosts: list[str], argv: Sequence[str] = WORKER, **variables: object
) -> Iterator[Ranks]:
    with started_ranks(cluster, hosts, argv, LIFE, subprocess.PIPE, **variables) as processes:
        ranks = Ranks.of(processes)
        yield ranks
        codes = ranks.close()
        assert codes == [0] * len(hosts), "\n".join(
            process.stderr.read() for process in processes if process.stderr
        )


OVER_TCP: dict[str, object] = {}


@pytest.fixture(
    scope="module",
    params=[
        repeat(("2x1", OVER_TCP)),
        repeat(("2x2", OVER_TCP)),
        repeat(("3+1", OVER_TCP)),
        ("1+2+1, in turn", OVER_TCP),
        repeat(("2x2", OVER_LIBFABRIC)),
        repeat(("3+1", OVER_LIBFABRIC)),
        repeat(("4x2", OVER_LIBFABRIC)),
        ("1+2+1, in turn", OVER_LIBFABRIC),
    ],
    ids=str,
)
def ranks(request: pytest.FixtureRequest, the_cluster: Cluster) -> Iterator[Ranks]:
    """Ranks on several hosts, for all tests with this layout."""
    layout, variables = request.param
    yield from ranks_on(the_cluster, LAYOUTS[layout], **variables)


def test_a_random_mix_gives_gloos_results(ranks: Ranks) -> None:
    assert ranks.call("mix", 17, 300, limit=180) == [300] * ranks.size


def test_each_operation_completes_in_the_background_for_an_early_rank(ranks: Ranks) -> None:
    """This includes coalesced operations.  In some layouts, the early rank is alone on its host."""
    for kind in names.COMPLETIONS:
        for early in (0, ranks.size - 1):
            assert ranks.call("completes_elsewhere", kind, "no_grad, parameter", "ccl", early)[early]


def test_sums_have_the_same_bits_in_any_kind_of_memory(ranks: Ranks) -> None:
    assert ranks.call("shared_sums") == ["ok"] * ranks.size


def test_object_collectives(ranks: Ranks) -> None:
    for rank, (gathered, broadcast, scattered) in enumerate(ranks.call("objects")):
        assert gathered == [{"rank": r, "text": "x" * r * 100} for r in range(ranks.size)]
        assert (broadcast, scattered) == (["from 1", 1], [rank * 10])


def test_operations_in_flight_can_be_waited_for_in_any_order(ranks: Ranks) -> None:
    assert ranks.call("any_order", 5, 100) == ["ok"] * ranks.size


def test_two_threads_can_use_groups_across_hosts(ranks: Ranks) -> None:
    assert ranks.call("two_threads", 3, 100) == ["ok"] * ranks.size


def test_destroyed_groups_leave_no_resources(ranks: Ranks) -> None:
    for before, after in ranks.call("come_and_go", 150, limit=120):
        # All groups share the progress engine's threads, as many as were ever needed at once.
        assert after.pop("threads") <= before.pop("threads") + 3
        # A process uses a single key for the heartbeats of all its groups.
        assert before.pop("heartbeats") <= after.pop("heartbeats") <= ranks.size
        assert set(after.pop("keys")) <= set(before.pop("keys"))
        # The first count may include a destroyed group that the watchdog still held.
        assert all(count <= before[what] for what, count in after.items())


def test_sums_have_the_same_bits_in_all_ranks_and_every_time(ranks: Ranks) -> None:
    first, *others = ranks.call("digests") + ranks.call("digests")
    assert all(other == first for other in others)


def test_compressed_averages_are_rounded_only_for_sending(ranks: Ranks) -> None:
    assert ranks.call("compressed_averages") == ["ok"] * ranks.size
    assert ranks.call("exact_averages") == ["ok"] * ranks.size


@pytest.mark.parametrize(
    ("layout", "transport"), [("1x2", "auto"), repeat("2x2", "auto"), repeat("2x2", "ofi")]
)
def test_a_rank_without_access_to_its_neighbours_memory_can_take_part(
    the_cluster: Cluster, layout: str, transport: str
) -> None:
    variables = {"MASTER_PORT": PORT + 1, "CPULAUNCH_RANK_CCL_TRANSPORT": transport}
    for ranks in ranks_on(the_cluster, hosts_of(layout), [*UNPRIVILEGED, *WORKER], **variables):
        assert ranks.call("shares_memory") == [[False, False]] * ranks.size
        assert ranks.call("mix", 17, 100, limit=180) == [100] * ranks.size


@pytest.mark.repeats
def test_oneccl_carries_all_traffic_if_its_algorithm_is_set(the_cluster: Cluster) -> None:
    """A rank alone on its host has to choose the same transports as the others."""
    variables = {**OVER_LIBFABRIC, "CCL_ALLREDUCE": "ring"}
    for ranks in ranks_on(the_cluster, LAYOUTS["3+1"], MASTER_PORT=PORT + 1, **variables):
        assert len(set(ranks.call("shm_sums", "float32"))) == 1
        ranks.call("objects")
        ranks.call("exact_averages")
        for dtype in ("float32", "int64"):
            ranks.call("movement", "all_to_all_single", dtype, [4097], "plain", 1, 1, True)
            ranks.call("reduction", "reduce_scatter", "MAX", dtype, [4097], "plain", 1, 1, True)
