"""Creates a ccl group: exchanges the ranks' data through torch's store, and chooses the transport."""

from __future__ import annotations

import atexit
import hashlib
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import PrefixStore

from cpulaunch import ledger
from cpulaunch.ccl import bindings, installed, load
from cpulaunch.ccl.core import Carrier, Core, Endpoint, Handle, Layout
from cpulaunch.ccl.key import KeyOffer, group_key, offer_key
from cpulaunch.ccl.load import Loaded, leave_mpi
from cpulaunch.ccl.meeting import (
    Meeting,
    Peer,
    cache_of,
    cores_of,
    groups_of_host,
    own_address,
    shares_cores,
    threads_of_each,
)
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.settings import Table
from cpulaunch.errors import HostError
from cpulaunch.plan.communication import decide_transport, needs_libfabric, needs_oneccl

_SPARE_DESCRIPTORS = 256  # for files that the program opens later
_MIN_STORE_INTERVAL = 0.2  # seconds
_REQUESTS_PER_SECOND = 100  # by all waiting ranks of a group to the store

has_failed = False
"""Whether the program ends with an exit code other than 0.  The bootstrap sets it, as atexit functions
can't see the code of ``sys.exit``."""

GLOO_IS_REFUSED = (
    "this call needs gloo, which can't keep its ports within --port-range.  Reductions of sparse tensors "
    "need gloo; with --ccl-transport oneccl and mpi, bitwise reductions and messages need it, too"
)


def create(options: Any, backend_options: Any) -> Any:
    """Create the process group for ``options``, torch's DistributedBackendOptions.

    Raises HostError if the compiled group is missing, and torch's DistBackendError if ranks are missing.
    """
    there = installed.state()
    if bindings.are_wanted(rank_setting(Table.ccl.binding, os.environ), there):
        return _by_bindings(there, options, backend_options)
    loaded = load.load_group()
    module = loaded.module
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    store = _store(options)
    meeting = Meeting(store, rank, _numbers(options), timeout)
    peers = [Peer(*each) for each in meeting.exchange("peer", Peer.this_process())]
    if not _state.ready:
        _state.variables, _state.known = dict(os.environ), {}
        _state.communication_threads = load.set_up(module, load.Neighbours.of(rank, peers))
        if ports := listening_ports():
            loaded.core.listen_within(ports)
        if ledger.of_this_process is not None:
            module.open_ledger(ledger.of_this_process)
        atexit.register(_leave, loaded)
        _state.ready, _state.pid = True, os.getpid()
    here = peers[rank].host
    _state.known |= {(peer.host, peer.pid): peer for peer in peers}
    cores = cores_of(peers[rank], _state.known.values())  # among ranks of all groups so far
    carrier = _carrier(loaded.core, meeting, peers)
    gloo = None
    if not carrier.has_messages and not listening_ports():
        # gloo sends messages.  All ranks must make its group now, as most of them take no part in a send.
        gloo = _gloo_fallback(store, rank, size, timeout)
        # While oneCCL connects, other groups of this process make no progress, so all ranks must be ready.
        meeting.exchange("ready", None)
    group = module.ProcessGroupCCL(
        store,
        rank,
        size,
        timeout=timeout.total_seconds(),
        name=options.group_id,
        numbers=meeting.numbers,
        in_ledger=ledger.members_text(meeting.numbers),
        host_names=_host_names(peers),
        crowded=_is_crowded(cores),
        shares_cores=shares_cores(rank, peers),
        cores=max(1, cores),
        local_peers=[(r, peer.pid) for r, peer in enumerate(peers) if r != rank and peer.host == here],
        heartbeat=_heartbeat(rank, peers, meeting.numbers),
        store_interval=store_interval(size),
        silence=rank_setting(Table.watch.heartbeat_timeout, os.environ),
        carrier=carrier.handle.taken(),
        make_gloo=((lambda: gloo) if gloo else (lambda: _gloo_fallback(store, rank, size, timeout))),
    )
    meeting.end()
    if distributed.group.WORLD is None:
        # In the group of all ranks: all have mapped libfabric's shared memory.  Without a name, it can't
        # outlive the ranks.
        _unlink_shared_memory()
    return group


def _store(options: Any) -> Any:
    """Return a store with a prefix for the group's ranks.

    torch's prefix is the group's number.  If ranks 0 and 1 make a group while ranks 2 and 3 make another,
    both have the same number.
    """
    members = hashlib.sha256(repr(options.global_ranks_in_group).encode()).hexdigest()[:16]
    return PrefixStore(f"cpulaunch-ccl/{members}", options.store)


def _numbers(options: Any) -> list[int]:
    """Return the ranks' numbers in the job; for the group of all ranks, torch gives none."""
    return list(options.global_ranks_in_group) or list(range(options.group_size))


def _is_crowded(cores: int) -> bool:
    """Return whether a rank with ``cores`` CPUs yields while it waits; the user's CCL_YIELD wins."""
    if yields := _state.variables.get("CCL_YIELD"):
        return yields == "sched_yield"
    return cores == 0


def _by_bindings(there: installed.State, options: Any, backend_options: Any) -> Any:
    """Create a group by Intel's bindings.  The first call also sets oneCCL's variables."""
    if _state.bindings is None:
        rank = options.group_rank
        meeting = Meeting(_store(options), rank, _numbers(options), options.timeout)
        peers = [Peer(*each) for each in meeting.exchange("peer", Peer.this_process())]
        os.environ.update(load.settings(load.Neighbours.of(rank, peers), os.environ, bindings=True))
        meeting.end()
        _state.bindings = bindings.load(there)
    return _state.bindings(options, backend_options)


def _carrier(core: Core, meeting: Meeting, peers: list[Peer]) -> Carrier:
    """Choose and create the transport of the collectives.

    If a rank may not open another rank's shared memory, ranks connect as if each were on a host of its own.
    """
    hosts = [peer.host for peer in peers]
    names = _host_names(peers)
    layout = Layout(
        meeting.rank,
        [hosts.index(host) for host in hosts],
        groups_of_host(meeting.rank, peers),
        meeting.numbers,
        names,
        threads_of_each(peers),
        cache_of(peers[meeting.rank].cpus),
    )
    transport = _transport(layout.hosts, max(hosts.count(host) for host in set(hosts)))
    if needs_oneccl(transport):
        return core.oneccl_carrier(load.oneccl_module(), layout)
    # If libfabric is missing, raise before other ranks wait for this rank.
    libfabric = load.fabric_library(os.environ) if needs_libfabric(transport) else None
    memory, slots = _shared_memory(core, meeting, peers[layout.locals[0]].pid, layout)
    if not memory:
        layout = replace(layout, host_of=list(range(len(peers))), socket_of=[-1] * len(peers))
    return _own_carrier(core, meeting, layout, slots, libfabric)


def _shared_memory(
    core: Core, meeting: Meeting, first_pid: int, layout: Layout
) -> tuple[bool, Handle | None]:
    """Return whether shared memory works on all hosts, and this host's memory.

    The first rank of a host offers the memory to the others.  It is None if this rank is alone on its host.
    """
    if layout.hosts == meeting.size:
        return True, None
    memory, slots = -1, None
    first, shares = layout.locals[0], len(layout.locals) > 1
    with ExitStack() as stack:
        if shares and meeting.rank == first:
            memory = core.offer_memory(layout)
            if memory >= 0:
                stack.callback(os.close, memory)
        offers = meeting.exchange("memory", memory)
        if shares:
            slots = core.map_memory(layout, pid=first_pid, descriptor=offers[first])
        everywhere = all(meeting.exchange("mapped", not shares or slots is not None))
    return everywhere, slots if everywhere else None


def reserve_descriptors(others: int, connections: int) -> None:
    """Raise the soft limit of open files so that a group can connect to ``others`` ranks of other hosts.

    Two ranks have ``connections`` for collectives and one for messages; twice as many in groups of few hosts,
    or if both open one at the same moment.  The soft limit is often 1,024, and the hard one 500,000 or more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + 2 * (connections + 1) * others + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _own_carrier(
    core: Core, meeting: Meeting, layout: Layout, slots: Handle | None, libfabric: str | None
) -> Carrier:
    if layout.hosts == 1:
        return core.own_carrier(layout, slots)
    ip = own_address(_state.variables, layout.locals.index(meeting.rank))
    threads = _state.communication_threads
    reserve_descriptors(layout.size - len(layout.locals), threads)
    endpoint = _endpoint(core, libfabric, ip) if libfabric else None
    name = endpoint.name.hex() if endpoint else ""
    listener = core.listen(ip)
    try:
        own_key = offer_key(meeting.rank, _state.variables)
        offers = meeting.exchange("address", (ip, listener[1], name, own_key, threads))
        keys = [KeyOffer(*each) for *_, each, _ in offers]
        key = group_key(keys, meeting.numbers, _state.variables)
    except BaseException:
        os.close(listener[0])
        raise
    return core.own_carrier(
        layout,
        slots,
        listener=listener,
        addresses=[(ip, port) for ip, port, *_ in offers],
        key=key,
        endpoint=endpoint,
        names=[bytes.fromhex(name) for _, _, name, *_ in offers] if endpoint else (),
        connections=min(threads for *_, threads in offers),
    )


def _endpoint(core: Core, libfabric: str, ip: str) -> Endpoint:
    """Open an endpoint of libfabric.  Only the provider tcp surely uses the network of ``ip``."""
    provider = os.environ.get("FI_PROVIDER", "")
    try:
        return core.open_endpoint(libfabric, ip if provider == "tcp" else "")
    except HostError as error:
        # The hint is in the message, as a rank's traceback may not show hints.
        raise HostError(f"{error} (FI_PROVIDER={provider}). Or use `--ccl-transport tcp`.") from None


def _transport(hosts: int, local_ranks: int) -> str:
    workers = _state.variables.get("CCL_WORKER_COUNT", "")
    return decide_transport(
        rank_setting(Table.ccl.transport, _state.variables),
        hosts=hosts,
        local_ranks=local_ranks,
        provider=_state.variables.get("FI_PROVIDER"),
        worker_count=int(workers) if workers.isdigit() else 1,
        user_variables=_state.variables,
    )


def store_interval(ranks: int) -> float:
    """Return the seconds between two requests of a waiting rank to the store.

    The store has one thread.  All waiting ranks together send about a hundred requests per second.
    """
    return max(_MIN_STORE_INTERVAL, ranks / _REQUESTS_PER_SECOND)


def _host_names(peers: list[Peer]) -> list[str]:
    """Return each rank's host name; an empty list if there is one host."""
    names = [peer.host.partition(" ")[0] for peer in peers]
    return names if len({peer.host for peer in peers}) > 1 else []


def _heartbeat(rank: int, peers: list[Peer], numbers: Sequence[int]) -> tuple[str, str, str, str]:
    """Return the key of this rank's heartbeat, the address in it, the key to watch, and that key's host.

    The first rank of each host writes a heartbeat to the store.  The hosts form a ring, in which each host's
    ranks watch the next host.  A key has the writer's process id, as the process writes one heartbeat for all
    its groups.  ``numbers`` are the ranks' numbers in the job.
    """
    hosts = list(dict.fromkeys(peer.host for peer in peers))
    if len(hosts) == 1:
        return "", "", "", ""
    own = peers[rank].host
    after = hosts[(hosts.index(own) + 1) % len(hosts)]
    ours, theirs = ([r for r, peer in enumerate(peers) if peer.host == host] for host in (own, after))
    keys = [f"cpulaunch-ccl/heartbeat/{peers[r].host}/{peers[r].pid}" for r in (ours[0], theirs[0])]
    name = f"{after.partition(' ')[0]} (rank {', '.join(str(numbers[r]) for r in theirs)})"
    if rank != ours[0]:
        return "", "", keys[1], name
    address = ""
    with suppress(HostError):  # oneCCL may work without an address
        address = own_address(_state.variables)
    return keys[0], address, keys[1], name


class _State:
    bindings: Any = None  # creator function of Intel's bindings, once they are loaded
    ready = False
    pid: int  # of the process that made the first group
    communication_threads: int
    variables: dict[str, str]  # the environment before cpulaunch added variables
    known: dict[tuple[str, int], Peer]  # (host, pid) → rank, in all groups so far


_state = _State()


def listening_ports() -> range | None:
    """Return the ports on which this rank may listen; None if all ports are allowed."""
    ports = rank_setting(Table.hosts.port_range, os.environ)
    return None if ports == "auto" else ports.ports


def _gloo_fallback(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group of the same ranks.  Raises HostError if the job's ports are restricted."""
    if listening_ports():
        raise HostError(GLOO_IS_REFUSED)
    return distributed.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)


def _leave(loaded: Loaded) -> None:
    """End oneCCL at interpreter exit, before its destructors run."""
    if os.getpid() != _state.pid:
        return  # a forked process has neither the threads nor the collectives
    failed = has_failed or hasattr(sys, "last_type")
    try:
        loaded.module.check_calls()
    finally:
        loaded.module.shutdown(has_failed=failed)
        leave_mpi(has_failed=failed)
        _unlink_shared_memory()


def _unlink_shared_memory() -> None:
    """Remove the files of this process's libfabric in /dev/shm, whose names begin with its pid."""
    for path in Path("/dev/shm").glob(f"{os.getpid()}:*:*"):
        path.unlink(missing_ok=True)
