"""Makes a ccl group from torch's store: exchanges the ranks' places, and chooses transport and fallback."""

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

_SPARE_DESCRIPTORS = 256  # for what the program opens later, mainly data files
_MIN_STORE_INTERVAL = 0.2  # seconds
_LOOKS_PER_SECOND = 100  # requests to the store, by all ranks of a group together

has_failed = False
"""Whether the program ends with an exit code other than 0.  The bootstrap sets it.

Python itself reports only exceptions, not ``sys.exit(1)``.
"""

GLOO_IS_REFUSED = (
    "--port-range is set, and gloo, which this call needs, can't keep its ports within a range.  Reductions "
    "of sparse tensors need it; with --ccl-transport oneccl and mpi, bitwise ones and messages do, too"
)


def create(options: Any, backend_options: Any) -> Any:
    """Return the process group ``ccl`` for ``options``, torch's DistributedBackendOptions.

    Raises HostError if the group is not built for this torch, and torch's DistBackendError if the ranks do
    not meet.
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
    cores = cores_of(peers[rank], _state.known.values())  # among the ranks of all groups so far
    carrier = _carrier(loaded.core, meeting, peers)
    gloo = None
    if not carrier.has_messages and not listening_ports():
        # Then gloo sends messages: a rank that takes no part in a send would never come to help make the
        # group.
        gloo = _gloo_fallback(store, rank, size, timeout)
        # While oneCCL connects, no other group of this process moves, so no waiting is allowed after this.
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
        # This is the group of all ranks.  They have mapped each other's shared memory, and nothing else needs
        # its name.  Without a name, it cannot outlive the ranks, however they end.
        _unlink_shared_memory()
    return group


def _store(options: Any) -> Any:
    """Return the group's own part of the store.

    torch names groups by their number: if ranks 0 and 1 make a group while ranks 2 and 3 make another one,
    both have the same name.
    """
    members = hashlib.sha256(repr(options.global_ranks_in_group).encode()).hexdigest()[:16]
    return PrefixStore(f"cpulaunch-ccl/{members}", options.store)


def _numbers(options: Any) -> list[int]:
    """Return the ranks' numbers in the job; for the group of all ranks, torch gives none."""
    return list(options.global_ranks_in_group) or list(range(options.group_size))


def _is_crowded(cores: int) -> bool:
    """Return whether a rank with this many cores yields them; the user's CCL_YIELD wins."""
    if yields := _state.variables.get("CCL_YIELD"):
        return yields == "sched_yield"
    return cores == 0


def _by_bindings(there: installed.State, options: Any, backend_options: Any) -> Any:
    """Return a group of Intel's bindings; set oneCCL up when the first one is made."""
    if _state.bindings is None:
        rank = options.group_rank
        meeting = Meeting(_store(options), rank, _numbers(options), options.timeout)
        peers = [Peer(*each) for each in meeting.exchange("peer", Peer.this_process())]
        os.environ.update(load.settings(load.Neighbours.of(rank, peers), os.environ, bindings=True))
        meeting.end()
        _state.bindings = bindings.load(there)
    return _state.bindings(options, backend_options)


def _carrier(core: Core, meeting: Meeting, peers: list[Peer]) -> Carrier:
    """Choose and return the transport of the collectives.

    If a rank may not open memory that another rank of its host offers, shared memory is not used.  The ranks
    are then connected as if each had a host of its own.
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
    # Before the others wait for this rank.
    libfabric = load.fabric_library(os.environ) if needs_libfabric(transport) else None
    memory, slots = _shared_memory(core, meeting, peers[layout.locals[0]].pid, layout)
    if not memory:
        layout = replace(layout, host_of=list(range(len(peers))), socket_of=[-1] * len(peers))
    return _own_carrier(core, meeting, layout, slots, libfabric)


def _shared_memory(
    core: Core, meeting: Meeting, first_pid: int, layout: Layout
) -> tuple[bool, Handle | None]:
    """Return whether all ranks have the memory that they need, and the memory that this host's ranks share.

    The first rank of a host offers the memory.  A rank that is alone on its host needs none.
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
    """Raise the limit of open files, so that a group can connect to ``others`` ranks of other hosts.

    With each of them, it may have this number of ``connections`` for collectives and one for messages, in
    each direction.  The soft limit is often 1,024 while the hard limit is 500,000 or more.
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
    """Open this rank's end of a fabric.  Only of the provider `tcp` is known that ``ip`` is the card's."""
    provider = os.environ.get("FI_PROVIDER", "")
    try:
        return core.open_endpoint(libfabric, ip if provider == "tcp" else "")
    except HostError as error:
        # A rank's traceback would not show a hint.
        raise HostError(f"{error} (FI_PROVIDER={provider}). `--ccl-transport tcp` needs none.") from None


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

    The store has one thread for all ranks.  It gets at most some hundred requests a second, however many
    ranks wait.
    """
    return max(_MIN_STORE_INTERVAL, ranks / _LOOKS_PER_SECOND)


def _host_names(peers: list[Peer]) -> list[str]:
    """Return each rank's host name; none if there is one host."""
    names = [peer.host.partition(" ")[0] for peer in peers]
    return names if len({peer.host for peer in peers}) > 1 else []


def _heartbeat(rank: int, peers: list[Peer], numbers: Sequence[int]) -> tuple[str, str, str, str]:
    """Return this rank's key and the address in it, the key that this rank reads, and that key's host.

    The first rank of each host writes a key.  The ranks of the previous host read it, and those of the last
    host read the first host's.  So each rank reads one key, however many hosts there are.  A key names a
    process, and the process writes the same key for all its groups.  ``numbers`` are the ranks' numbers in
    the job.
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
    with suppress(HostError):  # oneCCL may work without it
        address = own_address(_state.variables)
    return keys[0], address, keys[1], name


class _State:
    bindings: Any = None  # their creator function, once they are loaded
    ready = False
    pid: int  # of the process that made the first group
    communication_threads: int
    variables: dict[str, str]  # before cpulaunch added its own
    known: dict[tuple[str, int], Peer]  # (host, pid) → rank, for all groups so far


_state = _State()


def listening_ports() -> range | None:
    """Return the ports on which this rank may listen; None if any will do."""
    ports = rank_setting(Table.hosts.port_range, os.environ)
    return None if ports == "auto" else ports.ports


def _gloo_fallback(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group of the same ranks.  Raises HostError if the job's ports are restricted."""
    if listening_ports():
        raise HostError(GLOO_IS_REFUSED)
    return distributed.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)


def _leave(loaded: Loaded) -> None:
    """End oneCCL at interpreter exit: no thread may be inside it when its destructors run."""
    if os.getpid() != _state.pid:
        return  # a forked process owns neither the threads nor the collectives
    failed = has_failed or hasattr(sys, "last_type")
    try:
        loaded.module.check_calls()
    finally:
        loaded.module.shutdown(has_failed=failed)
        leave_mpi(has_failed=failed)
        _unlink_shared_memory()


def _unlink_shared_memory() -> None:
    """Remove the names of libfabric's shared memory of this process, ``/dev/shm/PID:N:N``."""
    for path in Path("/dev/shm").glob(f"{os.getpid()}:*:*"):
        path.unlink(missing_ok=True)
