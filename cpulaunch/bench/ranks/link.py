"""Measures TCP between hosts: all hosts send at the same time, each one to the next."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from contextlib import ExitStack
from typing import NamedTuple

from cpulaunch.bench.ranks.barrier import Barrier

SECONDS = 0.4
"""Duration of a measurement."""

PIECE = 1 << 20
"""Bytes per call of send(2)."""

ROUND_TRIPS = 200

TIMEOUT = 60.0
"""Seconds without an answer after which a connection has failed."""


class Speed(NamedTuple):
    """Bytes per second that a rank sends, alone on its host and together with the host's other ranks.

    ``latency_us``: half of the round trip of a small message, in microseconds.  Values not measured are 0.
    """

    alone: float = 0.0
    together: float = 0.0
    latency_us: float = 0.0


def measure(barrier: Barrier, address: str, hosts: list[int]) -> Speed:
    """Measure this rank's connection to the next host.  All ranks call this.  Raises OSError.

    ``address``: this host's address.  ``hosts``: the number of each rank's host.  Local rank i of a host
    sends to local rank i of the next host; a rank without such a peer only waits at the barriers, and gets
    Speed().
    """
    ranks = [[rank for rank, host in enumerate(hosts) if host == each] for each in sorted(set(hosts))]
    lanes = min(map(len, ranks))
    here = next(number for number, of_host in enumerate(ranks) if barrier.rank in of_host)
    lane = ranks[here].index(barrier.rank)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((address, 0), family=_family(address)))
        server.settimeout(TIMEOUT)
        addresses = barrier.exchange([address, server.getsockname()[1]])
        if len(ranks) == 1:
            return Speed()
        if lane >= lanes:
            for _ in range(3):
                barrier.exchange()
            return Speed()
        target, port = addresses[ranks[(here + 1) % len(ranks)][lane]]
        out = stack.enter_context(socket.create_connection((target, port), TIMEOUT))
        incoming = stack.enter_context(server.accept()[0])
        for each in (out, incoming):
            each.settimeout(TIMEOUT)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        latency = _round_trips(out, incoming)
        barrier.exchange()
        alone = _sent_per_second(out, incoming) if lane == 0 else 0.0
        barrier.exchange()
        together = _sent_per_second(out, incoming)
        barrier.exchange()
        return Speed(alone, together, latency * 1e6)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _round_trips(out: socket.socket, incoming: socket.socket) -> float:
    """Measure round trips to the next host while answering the previous one; return half the median (s)."""

    def answer() -> None:
        for _ in range(ROUND_TRIPS):
            incoming.sendall(_received(incoming, 1))

    echo = threading.Thread(target=answer)
    echo.start()
    times = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        out.sendall(b"x")
        _received(out, 1)
        times.append(time.perf_counter() - began)
    echo.join(TIMEOUT)
    return statistics.median(times) / 2


def _sent_per_second(out: socket.socket, incoming: socket.socket) -> float:
    """Return the bytes per second that the next host receives, while this rank also receives."""
    received = bytearray(PIECE)

    def receive() -> None:
        while (count := incoming.recv_into(received)) and received[count - 1] != 1:
            pass
        incoming.sendall(b"x")

    sink = threading.Thread(target=receive)
    sink.start()
    piece, sent = bytes(PIECE), 0
    began = time.perf_counter()
    while time.perf_counter() < began + SECONDS:
        out.sendall(piece)
        sent += PIECE
    out.sendall(b"\1")
    _received(out, 1)  # wait until the next host has read everything
    seconds = time.perf_counter() - began
    sink.join(TIMEOUT)
    return sent / seconds


def _received(connection: socket.socket, count: int) -> bytes:
    data = connection.recv(count)
    if not data:
        raise ConnectionError("the connection to another rank was closed")
    return data
