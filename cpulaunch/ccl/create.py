"""Makes a ccl group out of torch's store: who is where, the gloo fallback, oneCCL."""

from __future__ import annotations

import atexit
import json
import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import PrefixStore

from cpulaunch.ccl import installed, load
from cpulaunch.ccl.mpi import leave_mpi
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.errors import HostError

_PEERS = "peer/"


@dataclass(frozen=True)
class Peer:
    """What a rank tells the others about itself."""

    host: str  # the same for ranks that see each other's processes and shared memory
    pid: int
    cpus: tuple[int, ...]
    memory: int  # a descriptor, in this process, of memory offered to all ranks of the group; -1: none


def create(options: Any, backend_options: Any) -> Any:
    """The process group ``ccl`` for ``options``, torch's DistributedBackendOptions.

    Raises HostError where the group is not built for this torch, and torch's DistBackendError where the
    ranks do not come together.
    """
    there = installed.state()
    binding = rank_setting("ccl.binding", os.environ)
    if installed.use_bindings(binding, there):
        creator = _intels_creator(there, insist=binding == "oneccl_bind_pt")
        if creator is not None:
            return creator(options, backend_options)
    module = load.load_module()
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    store = PrefixStore("cpulaunch-ccl", options.store)
    with ExitStack() as stack:
        memory = _offer_shared_memory(module, size, stack) if rank == 0 else -1
        peers = _meet(store, rank, size, timeout, memory)
        if not _state.ready:
            load.set_up(module, _neighbours(rank, peers))
            atexit.register(_leave, module)
            _state.ready = True
        here = peers[rank].host
        group = module.ProcessGroupCCL(
            store,
            rank,
            size,
            timeout=timeout.total_seconds(),
            name=options.group_id,
            local_peers=[(r, peer.pid) for r, peer in enumerate(peers) if r != rank and peer.host == here],
            heartbeat=_heartbeat(rank, peers),
            shared_memory=(peers[0].pid, peers[0].memory),
            gloo_fallback=_gloo_fallback(store, rank, size, timeout),
        )
    if distributed.group.WORLD is None:
        # This is the group of all ranks: they have mapped each other's shared memory, and nobody else will
        # ask for its name.  Nameless, it cannot outlive the ranks, however they end.
        _unlink_shared_memory()
    return group


def _heartbeat(rank: int, peers: list[Peer]) -> tuple[str, str, str]:
    """The key that this rank writes, the one that it reads, and the name of the host that writes that.

    The first rank of each host writes, and the ranks of the host before it read: in a circle, so that each
    rank asks the store for one key, however many hosts there are.
    """
    hosts = list(dict.fromkeys(peer.host for peer in peers))
    if len(hosts) == 1:
        return "", "", ""
    own = hosts.index(peers[rank].host)
    after = (own + 1) % len(hosts)
    first = next(r for r, peer in enumerate(peers) if peer.host == hosts[own])
    name = hosts[after].partition(" ")[0]
    others = ", ".join(str(r) for r, peer in enumerate(peers) if peer.host == hosts[after])
    return f"heartbeat/{own}" if rank == first else "", f"heartbeat/{after}", f"{name} (rank {others})"


class _State:
    ready = False


_state = _State()


def _gloo_fallback(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return distributed.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)


def _offer_shared_memory(module: ModuleType, size: int, stack: ExitStack) -> int:
    """A descriptor of memory for the sums of the ranks of one host, open until ``stack`` is closed.

    -1 where there is none.  csrc/transport_shm.hpp says who decides that, and on what.
    """
    descriptor: int = module.offer_shared_memory(size)
    if descriptor >= 0:
        stack.callback(os.close, descriptor)
    return descriptor


def _meet(store: Any, rank: int, size: int, timeout: timedelta, memory: int) -> list[Peer]:
    me = Peer(_host(), os.getpid(), tuple(sorted(os.sched_getaffinity(0))), memory)
    store.set(f"{_PEERS}{rank}", json.dumps(me.__dict__))
    keys = [f"{_PEERS}{other}" for other in range(size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        raise distributed.DistBackendError(
            f"ccl: {len(missing)} of {size} ranks did not come within {timeout.total_seconds():g} s: "
            f"{', '.join(missing[:20])}"
        ) from error
    said = [json.loads(store.get(key)) for key in keys]
    return [Peer(one["host"], one["pid"], tuple(one["cpus"]), one["memory"]) for one in said]


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{socket.gethostname()} {boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _neighbours(rank: int, peers: list[Peer]) -> load.Neighbours:
    here = [r for r, peer in enumerate(peers) if peer.host == peers[rank].host]
    cpus = {cpu for r in here for cpu in peers[r].cpus}
    return load.Neighbours(
        hosts=len({peer.host for peer in peers}),
        local_rank=here.index(rank),
        local_ranks=len(here),
        cores=len(peers[rank].cpus),
        oversubscribed=len(here) > len(cpus),
    )


def _leave(module: ModuleType) -> None:
    """At interpreter exit: no thread of ours may be inside oneCCL when its destructors run."""
    module.shutdown()
    leave_mpi()
    _unlink_shared_memory()


def _unlink_shared_memory() -> None:
    """Remove the names of libfabric's shared memory of this process, ``/dev/shm/PID:N:N``."""
    for path in Path("/dev/shm").glob(f"{os.getpid()}:*:*"):
        path.unlink(missing_ok=True)


def _intels_creator(there: installed.State, *, insist: bool) -> Any:
    """What importing oneccl_bindings_for_pytorch registers in our place; None where it does not load."""
    plugins = distributed.Backend._plugins
    ours = plugins["CCL"]
    try:
        __import__(installed.BINDINGS)
    except (ImportError, OSError) as error:
        if insist:
            raise HostError(f"{installed.bindings_advice(there)}. It failed with: {error}") from error
        return None
    theirs = plugins["CCL"]
    if theirs is ours:
        raise HostError(f"{installed.BINDINGS} was imported and registered no backend ccl")
    if theirs.extended_api:
        return theirs.creator_fn
    return lambda o, _: theirs.creator_fn(o.store, o.group_rank, o.group_size, o.timeout)
