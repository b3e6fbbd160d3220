"""Ranks on the hosts of a cluster: one process each, which no launcher pins, watches or ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.command import REPOSITORY, bounded, clean_environment
from support.faults import Cluster

PORT = 29400

OVER_LIBFABRIC = {"CPULAUNCH_RANK_CCL_TRANSPORT": "ofi"}
"""Variables of ranks that use libfabric between the hosts."""


def hosts_of(layout: str) -> list[str]:
    """The host of each rank: ``4x2`` is four hosts with two ranks each, ``3+1`` three ranks and one."""
    hosts, even, ranks = layout.partition("x")
    counts = [int(ranks)] * int(hosts) if even else [int(count) for count in layout.split("+")]
    return [f"node{number}" for number, count in enumerate(counts) for _ in range(count)]


@contextlib.contextmanager
def started_ranks(
    cluster: Cluster,
    hosts: Sequence[str],
    argv: Sequence[str | Path],
    limit: float,
    stdin: int = subprocess.DEVNULL,
    **variables: object,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a rank that runs ``argv`` on each of ``hosts``, with ``variables`` in its environment.

    It can import ``support``.  It is killed after ``limit`` seconds, and has ended after the block.
    """
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(REPOSITORY / "tests")]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, host in enumerate(hosts):
            own = {
                "RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": hosts[:rank].count(host),
                "LOCAL_WORLD_SIZE": hosts.count(host), "MASTER_ADDR": cluster.addresses[hosts[0]],
                "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR",
                "PYTHONPATH": os.pathsep.join(path),
                **dict.fromkeys(("GLOO_SOCKET_IFNAME", "FI_TCP_IFACE"), cluster.interfaces[host]),
                **variables,
            }  # fmt: skip
            env = clean_environment(**{name: str(value) for name, value in own.items()})
            started = cluster.start(host, argv, env=env, stdin=stdin)
            processes.append(stack.enter_context(bounded(started, limit)))
        yield processes


def answers(processes: Sequence[subprocess.Popen[str]]) -> list[Any]:
    """Wait until all ranks have ended; return the last line of each, read as JSON.

    Raises RuntimeError, with the ends of the ranks' output, if one has failed or was killed.
    """
    said = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("".join(map(end, range(len(said)), processes, said)))
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def end(rank: int, process: subprocess.Popen[str], said: tuple[str, str]) -> str:
    """Describe how a rank ended, with the last lines of its output."""
    lines = "".join(said).splitlines()[-5:]
    return f"\nrank {rank}, exit code {process.returncode}" + "".join(f"\n    {line}" for line in lines)
