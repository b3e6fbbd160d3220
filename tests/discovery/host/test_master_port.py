"""Reserving a port: which processes can bind it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.command import TIMEOUT

from cpulaunch.discovery.host import master_port

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

NOBODY = 65534

# Tries to bind a port with all combinations of address and options, and prints those that succeed.
TAKE = f"""
import itertools, os, socket, sys
os.setuid({NOBODY})
for family, address in ((socket.AF_INET, ""), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::"), (socket.AF_INET6, "::1")):
    for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
        with socket.socket(family) as s:
            for option in options:
                s.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                s.bind((address, int(sys.argv[1])))
                s.listen()
                print(family.name, address, options)
            except OSError:
                pass
"""


def taken_by_another_user(port: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TAKE, str(port)], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    return done.stdout


@pytest.fixture
def kept() -> Iterator[socket.socket]:
    with master_port.keep(0, None) as s:
        yield s


def port_of(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


@needs_root
def test_another_user_gets_the_port_only_after_its_release(kept: socket.socket) -> None:
    port = port_of(kept)
    assert taken_by_another_user(port) == ""
    with master_port.keep(port, str(port)):
        kept.close()
        assert taken_by_another_user(port) == ""
        with master_port.offered(port) as fd, socket.socket(fileno=fd) as listening:
            listening.listen()
            assert taken_by_another_user(port) == ""
    assert taken_by_another_user(port) != ""


def test_a_port_reserved_by_another_job_is_in_use(kept: socket.socket) -> None:
    for ours in (None, "", "1"):
        with pytest.raises(OSError, match="in use"):
            master_port.keep(port_of(kept), ours)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_taken_on_a_single_address_is_in_use(address: str) -> None:
    with socket.create_server(
        (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
    ) as s:
        with pytest.raises(OSError, match="in use"):
            master_port.keep(port_of(s), None)
        with pytest.raises(OSError, match="in use"):
            master_port.keep(port_of(s), str(port_of(s)))


def test_a_reserved_port_can_be_passed_on_until_a_process_listens(kept: socket.socket) -> None:
    port = port_of(kept)
    with master_port.offered(port) as refused:
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(refused)
    with master_port.offered(port) as fd:
        listening = socket.socket(fileno=fd)
        listening.listen()
    with listening:
        socket.create_connection(("localhost", port), TIMEOUT).close()
        with pytest.raises(OSError, match="in use"), master_port.offered(port):
            pytest.fail("two would share the connections")
    with master_port.offered(port):
        pass


def test_connections_that_have_just_ended_dont_block_the_port_for_the_next_job(kept: socket.socket) -> None:
    port = port_of(kept)
    with master_port.offered(port) as fd:
        listening = socket.socket(fileno=fd)
        listening.listen()
    with listening, socket.create_connection(("127.0.0.1", port), TIMEOUT) as client:
        accepted, _ = listening.accept()
        accepted.close()  # the side that closes first leaves the port in TIME_WAIT
        assert client.recv(1) == b""
    kept.close()
    with master_port.keep(port, None), master_port.offered(port):
        pass


def test_ports_are_tried_from_the_upper_half_of_a_range() -> None:
    assert master_port.candidates(29500, range(20000, 20004)) == [29500]
    assert master_port.candidates("auto", None) == [0]
    assert master_port.candidates("auto", range(20000, 20001)) == [20000]
    ports = master_port.candidates("auto", range(20000, 20005))
    assert sorted(ports[:3]) == [20002, 20003, 20004]
    assert ports[3:] == [20001, 20000]
    assert len(master_port.candidates("auto", range(1024, 65536))) == master_port.MAX_CANDIDATES


def test_the_first_free_port_is_taken() -> None:
    with master_port.keep(0, None) as kept:
        listened = master_port.first_free([port_of(kept), 0], lambda port: master_port.keep(port, None))
        with listened:
            assert port_of(listened) != port_of(kept)
        with pytest.raises(OSError, match="in use"):
            master_port.first_free([port_of(kept)], lambda port: master_port.keep(port, None))
