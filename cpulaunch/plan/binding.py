"""Assigns cores to the ranks of a host.

The planner calls ``bind`` for every host.  If it had to assume a host's topology, the host's agents call
``bind`` again with the actual topology.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

from cpulaunch.errors import PlanError
from cpulaunch.model.cores import CoreSet
from cpulaunch.model.topology import Core, Topology
from cpulaunch.plan.placement import RankPlan
from cpulaunch.plan.request import BindingRequest
from cpulaunch.wording import counted

SMALL_RANK = 4
"""Minimum physical cores of a rank that sets one aside for communication.

In a smaller rank, computation would lose more than communication gains.
"""

WITHIN_NODES = 0.9
"""A rank may give up at most a tenth of its cores in order to stay within a NUMA node."""


class Binding(NamedTuple):
    """The CPU binding of one host's ranks."""

    ranks: tuple[RankPlan, ...]
    idle: CoreSet  # CPUs of usable physical cores that no rank has
    worker_count: int  # for CCL_WORKER_COUNT; 0 if the backend isn't ccl
    notes: tuple[str, ...] = ()

    @property
    def oversubscribed(self) -> bool:
        """Whether some CPU serves two ranks, or both a rank's computation and its workers."""
        taken = CoreSet()
        for rank in self.ranks:
            if rank.cores & rank.comm_cores or taken & (rank.cores | rank.comm_cores):
                return True
            taken = taken | rank.cores | rank.comm_cores
        return False

    @property
    def worker_affinity(self) -> tuple[int, ...]:
        """The CPUs for ``CCL_WORKER_AFFINITY``: ``worker_count`` for each local rank in turn.

        The comm cores of an oversubscribed rank repeat if it has more workers than comm cores.
        """
        affinity: list[int] = []
        for rank in self.ranks:
            comm = list(rank.comm_cores)
            affinity += [comm[i % len(comm)] for i in range(self.worker_count)] if comm else []
        return tuple(affinity)


@lru_cache(maxsize=64)  # most hosts of a cluster have the same topology
def bind(topology: Topology, request: BindingRequest) -> Binding:
    """Return the CPUs of each local rank of a host.  Raises PlanError if the host can't fulfil the request.

    The usable physical cores are taken in the order of NUMA nodes and CPU numbers.  Every rank gets the same
    number of cores:

    1. *Size.*  With C cores for R ranks, each rank gets C // R cores, or the requested number.  If R ranks
       fit into nodes when each gives up at most a tenth of its cores, they get the largest size that fits.
       With ``bind_numa``, they get the largest size that fits into nodes, however small.
    2. *Within nodes.*  A node of c cores holds c // size ranks.  If all nodes together hold R, no rank
       spans nodes.  ``scatter`` puts each rank on the node, then the socket, with the fewest ranks so far;
       ``close`` fills node after node.  Ranks are numbered in the order of nodes.
    3. *Across nodes.*  Otherwise, ranks take consecutive cores, and C - R * size cores stay idle.  Idle cores
       at the end of a node can keep the next rank from spanning two nodes.  The idle cores are chosen so that
       the fewest ranks span nodes.
    4. *Max.*  Leftover cores go to the ranks of their node.  If that node has no ranks, or ranks span nodes
       anyway, all cores are divided anew into parts that differ by at most one core.
    5. *Oversubscribed*, with too few cores: ranks are spread over the nodes by their numbers of cores, and
       each node deals out its cores in turn, repeatedly.
    6. *Not pinned* (``none``): each rank has as many threads as its share has cores, and may use all cores.
    """
    _check_numbers(request)
    notes = list(topology.notes)
    nodes = _usable_cores(topology, request, notes)
    shares = _shares(nodes, request.ranks or _default_ranks(nodes, request), request)
    workers = _dedicated_workers(shares, topology.quota, request)
    ranks = _rank_bindings(shares, workers, topology.quota, request, notes)
    if request.strategy == "none":
        free = _unpinned(nodes, ranks, request)
        return Binding(free, CoreSet(), int(request.dedicate_workers), tuple(notes))
    spanning = _spanning_note(ranks, request.noun)
    if spanning:
        notes.append(spanning)
    used = {core for share in shares for core in share}
    spare = [core for node in nodes for core in node if core not in used]
    idle = CoreSet(cpu for core in spare for cpu in _cpus_given(core, request))
    if idle:
        notes.append(_idle_note(spare, idle, request))
    return Binding(ranks, idle, max(1, workers) if request.dedicate_workers else 0, tuple(notes))


def _check_numbers(request: BindingRequest) -> None:
    if request.strategy == "none" and request.bind_numa:
        raise PlanError("--strategy none lets ranks use all NUMA nodes, but --bind-numa binds each to one")
    if request.strategy == "none" and request.worker_count not in ("auto", 0):
        raise PlanError("--strategy none gives no cores to communication, but --ccl-worker-count needs some")
    for what, value, least in (
        ("ranks per host", request.ranks, 1),
        ("cores per rank", request.cores_per_rank, 1),
        ("cores for communication", request.worker_count, 0),
        ("threads", request.threads, 1),
    ):
        if isinstance(value, int) and value < least:
            raise PlanError(f"the number of {what} must be at least {least}, got {value}")


# --- which cores may be used ---


def _usable_cores(topology: Topology, request: BindingRequest, notes: list[str]) -> list[list[Core]]:
    """Return the physical cores of each NUMA node that has any, after all restrictions."""
    if request.cores is not None:
        outside = request.cores - topology.allowed
        if outside:
            raise PlanError(
                f"cores {request.cores}: {outside} can't be used on this host",
                hint=f"Usable: {topology.allowed or 'none'}.",
            )
        topology = topology.restricted(request.cores)
    if request.numa_nodes is not None:
        missing = request.numa_nodes - topology.nodes
        if missing:
            what = "memory but no cores" if missing <= topology.memory_only_nodes else "no usable cores"
            raise PlanError(
                f"NUMA nodes {request.numa_nodes}: {what} in {missing}",
                hint=f"Nodes with usable cores: {topology.nodes or 'none'}.",
            )
    cores = [c for c in topology.cores if request.numa_nodes is None or c.node in request.numa_nodes]
    efficient = [core for core in cores if core.efficient]
    if efficient and not request.e_cores and len(efficient) < len(cores):
        cores = [core for core in cores if not core.efficient]
        cpus = CoreSet(cpu for core in efficient for cpu in core.cpus)
        notes.append(f"{counted(len(efficient), 'E-core')} ({cpus}) not used; --use-e-cores uses them")
    if not cores:
        raise PlanError("no cores to use on this host", hint="Check --cores, --numa-nodes and the cpuset.")
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.node, []).append(core)
    return list(nodes.values())


# --- dividing them among ranks ---


def _shares(nodes: list[list[Core]], ranks: int, request: BindingRequest) -> list[list[Core]]:
    """Return the physical cores of each rank, by the rules in `bind`."""
    cores = [core for node in nodes for core in node]
    to_the_last = request.cores_per_rank == "max"
    size = _size(nodes, ranks, request)
    if size and _room(nodes, size) >= ranks:
        counts = _ranks_per_node(nodes, ranks, size, request.strategy)
        if not to_the_last:
            return [node[i * size :][:size] for node, n in zip(nodes, counts, strict=True) for i in range(n)]
        if request.bind_numa or all(counts):
            return [part for node, n in zip(nodes, counts, strict=True) for part in _cut(node, n)]
        return _cut(cores, ranks)
    if size and ranks * size <= len(cores) and not request.bind_numa:
        return _cut(cores, ranks) if to_the_last else _walk(nodes, ranks, size)
    if not request.oversubscribe:
        raise _too_few(nodes, ranks, request)
    size = max(1, size)
    wide_enough = [node for node in nodes if len(node) >= size]
    if not wide_enough and not request.bind_numa and len(cores) >= size:
        wide_enough = [cores]
    if not wide_enough:
        raise _too_few(nodes, ranks, request)
    return _shared(wide_enough, ranks, size)


def _size(nodes: list[list[Core]], ranks: int, request: BindingRequest) -> int:
    """Return physical cores per rank; 0 if there are fewer cores than ranks."""
    if isinstance(request.cores_per_rank, int):
        return request.cores_per_rank
    even = sum(len(node) for node in nodes) // ranks
    within = next((size for size in range(even, 0, -1) if _room(nodes, size) >= ranks), 0)
    return within if request.bind_numa or within >= WITHIN_NODES * even else even


def _default_ranks(nodes: list[list[Core]], request: BindingRequest) -> int:
    """Return one rank per NUMA node, or as many instances of the requested size as fit."""
    size = request.cores_per_rank
    if not request.instances or not isinstance(size, int):
        return len(nodes)
    return max(1, _room(nodes, size) or sum(len(node) for node in nodes) // size)


def _room(nodes: list[list[Core]], size: int) -> int:
    """Return how many ranks of ``size`` cores fit into nodes."""
    return sum(len(node) // size for node in nodes)


def _ranks_per_node(nodes: list[list[Core]], ranks: int, size: int, strategy: str) -> list[int]:
    counts = [0] * len(nodes)
    on_socket = dict.fromkeys((node[0].socket for node in nodes), 0)
    for _ in range(ranks):
        free = [i for i, node in enumerate(nodes) if len(node) >= (counts[i] + 1) * size]
        if strategy == "close":
            chosen = free[0]
        else:
            chosen = min(free, key=lambda i: (counts[i], on_socket[nodes[i][0].socket]))
        counts[chosen] += 1
        on_socket[nodes[chosen][0].socket] += 1
    return counts


def _walk(nodes: list[list[Core]], ranks: int, size: int) -> list[list[Core]]:
    """Give each rank ``size`` consecutive cores so that the fewest ranks span nodes."""
    cores = [core for node in nodes for core in node]
    left_in_node = [left for node in nodes for left in range(len(node), 0, -1)]

    @cache
    def best(start: int, spare: int) -> tuple[int, tuple[int, ...]]:
        """Return how many of the ranks from core ``start`` on span nodes, and each rank's first core."""
        to_go = (len(cores) - start - spare) // size
        if to_go == 0:
            return 0, ()
        whole, rest = divmod(left_in_node[start], size)
        within = tuple(range(start, start + min(whole, to_go) * size, size))
        if len(within) == to_go:
            return 0, within
        end = start + whole * size
        ways = []
        if rest:
            spans, begins = best(end + size, spare)
            ways.append((spans + 1, (end, *begins)))
        if rest <= spare:
            ways.append(best(end + rest, spare - rest))
        spans, begins = min(ways)
        return spans, within + begins

    _, begins = best(0, len(cores) - ranks * size)
    return [cores[begin : begin + size] for begin in begins]


def _shared(nodes: list[list[Core]], ranks: int, size: int) -> list[list[Core]]:
    """Place ranks that share cores: spread them over the nodes, whose cores they get in turn."""
    counts = [0] * len(nodes)
    for _ in range(ranks):
        counts[min(range(len(nodes)), key=lambda i: (counts[i] + 1) / len(nodes[i]))] += 1
    return [
        [node[(rank * size + i) % len(node)] for i in range(size)]
        for node, count in zip(nodes, counts, strict=True)
        for rank in range(count)
    ]


def _cut(cores: Sequence[Core], parts: int) -> list[list[Core]]:
    """Divide into consecutive parts whose lengths differ by at most one, the longer ones first."""
    size, longer = divmod(len(cores), parts) if parts else (0, 0)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return [list(cores[a:b]) for a, b in pairwise(starts)]


# --- communication, threads ---


def _dedicated_workers(shares: list[list[Core]], quota: float | None, request: BindingRequest) -> int:
    """Return how many cores of each rank, or hyperthread siblings of its cores, serve communication."""
    if not request.dedicate_workers or request.strategy == "none":
        return 0
    if request.worker_count == "auto":
        smallest = min(len(share) for share in shares)
        return int(min(smallest, _quota_each(quota, shares)) >= SMALL_RANK)
    return request.worker_count


def _rank_bindings(
    shares: list[list[Core]], workers: int, quota: float | None, request: BindingRequest, notes: list[str]
) -> tuple[RankPlan, ...]:
    on_siblings = bool(workers) and request.ccl_logical_cores
    if on_siblings and not all(_siblings(share, workers) for share in shares):
        on_siblings = False
        notes.append("communication gets physical cores: not every rank has hyperthread siblings for it")
    smallest = min(len(share) for share in shares)
    if workers >= smallest and not on_siblings and not request.oversubscribe:
        raise PlanError(
            f"no compute core left: a rank has {counted(smallest, 'physical core')}, "
            f"and communication takes {workers}",
            hint="Use fewer comm cores (--ccl-worker-count), fewer ranks, or --oversubscribe.",
        )
    ranks = []
    for local_rank, share in enumerate(shares):
        if on_siblings:
            comm, compute = _siblings(share, workers), share
        else:
            comm = CoreSet(core.cpus[0] for core in share[:workers])
            compute = share[workers:] or share
        threads = len(compute)
        nodes = CoreSet(core.node for core in share)
        places = tuple(CoreSet(_cpus_given(core, request)) for core in compute)
        if on_siblings:
            places = tuple(place - comm for place in places)
        cpus = CoreSet(cpu for place in places for cpu in place)
        own = () if request.oversubscribe else places
        ranks.append(RankPlan(local_rank, cpus, comm, nodes, threads, own))
    return _with_threads(ranks, workers, _quota_each(quota, shares), request, notes)


def _unpinned(
    nodes: list[list[Core]], ranks: Sequence[RankPlan], request: BindingRequest
) -> tuple[RankPlan, ...]:
    """Return the ranks with all usable cores each, so that the kernel places their threads."""
    cores = [core for node in nodes for core in node]
    everything = CoreSet(cpu for core in cores for cpu in _cpus_given(core, request))
    all_nodes = CoreSet(core.node for core in cores)
    return tuple(rank._replace(cores=everything, numa_nodes=all_nodes, places=()) for rank in ranks)


def _siblings(share: list[Core], workers: int) -> CoreSet:
    """Return one hyperthread sibling of each of the first ``workers`` cores; empty if some have none."""
    first = share[:workers]
    enough = len(first) == workers and all(len(core.cpus) > 1 for core in first)
    return CoreSet(core.cpus[1] for core in first) if enough else CoreSet()


def _with_threads(
    ranks: list[RankPlan], workers: int, quota_each: float, request: BindingRequest, notes: list[str]
) -> tuple[RankPlan, ...]:
    """Return the ranks with the user's number of threads, or as many as the quota allows."""
    if request.threads != "auto":
        return tuple(rank._replace(threads=request.threads) for rank in ranks)
    most = max(1, int(quota_each) - workers) if quota_each < float("inf") else max(r.threads for r in ranks)
    if any(rank.threads > most for rank in ranks):
        notes.append(
            f"a CPU quota of {quota_each * len(ranks):g} CPUs for {counted(len(ranks), request.noun)}: "
            f"{counted(most, 'thread')} each"
        )
    return tuple(rank._replace(threads=min(rank.threads, most)) for rank in ranks)


def _quota_each(quota: float | None, shares: list[list[Core]]) -> float:
    return float("inf") if quota is None else quota / len(shares)


def _cpus_given(core: Core, request: BindingRequest) -> tuple[int, ...]:
    """Return the CPUs that a rank gets with a core."""
    return core.cpus if request.logical_cores else core.cpus[:1]


# --- messages ---


def _too_few(nodes: list[list[Core]], ranks: int, request: BindingRequest) -> PlanError:
    total = sum(len(node) for node in nodes)
    have = f"{counted(total, 'usable physical core')}"
    if len(nodes) > 1:
        have += f" ({' + '.join(str(len(node)) for node in nodes)} in {len(nodes)} NUMA nodes)"
    size = request.cores_per_rank
    want, verb = counted(ranks, request.noun), "does" if ranks == 1 else "do"
    if isinstance(size, int):
        want += f" of {counted(size, 'core')}"
    if request.bind_numa:
        want += ", each within a NUMA node,"
    sharing = "" if request.oversubscribe else f", or let {request.noun}s share cores (--oversubscribe)"
    fewer = "instances (--instances, or lines of --each)" if request.instances else "ranks (-n, -ppn)"
    hint = f"Ask for fewer {fewer} or fewer cores each{sharing}."
    widest = max(len(node) for node in nodes)
    if request.instances and isinstance(size, int) and ranks > 1:
        hint = _what_fits(nodes, ranks, size, request) or hint
    elif request.instances and isinstance(size, int) and size > total:
        hint = f"--cores-per-instance {widest} fits here; the host has {counted(total, 'usable core')}."
    return PlanError(f"{want} {verb} not fit on {have}", hint=hint)


def _what_fits(nodes: list[list[Core]], ranks: int, size: int, request: BindingRequest) -> str:
    """Suggest fewer cores for each instance, or fewer instances of this size; empty if neither fits."""
    smaller = _size(nodes, ranks, replace(request, cores_per_rank="auto"))
    total = 0 if request.bind_numa else sum(len(node) for node in nodes)
    fewer = max(_room(nodes, size), total // size)
    option = f" (--cores-per-instance {smaller})"
    ways = [f"{counted(ranks, 'instance')} of {counted(smaller, 'core')}{option}"] if smaller else []
    ways += [f"{counted(fewer, 'instance')} of {counted(size, 'core')}"] if fewer else []
    return f"{' or '.join(ways)} would fit here." if ways else ""


def _spanning_note(ranks: Sequence[RankPlan], noun: str) -> str:
    spanning = [rank for rank in ranks if len(rank.numa_nodes) > 1]
    if len(spanning) == 1:
        return f"{noun} {spanning[0].local_rank} spans NUMA nodes {spanning[0].numa_nodes}"
    return f"{noun}s {CoreSet(rank.local_rank for rank in spanning)} span NUMA nodes" if spanning else ""


def _idle_note(spare: list[Core], idle: CoreSet, request: BindingRequest) -> str:
    shares_out = request.cores_per_rank == "auto" and not request.bind_numa and not request.oversubscribe
    remedy = f"; --cores-per-{request.noun} max uses them" if shares_out else ""
    return f"{counted(len(spare), 'core')} idle ({idle}){remedy}"
