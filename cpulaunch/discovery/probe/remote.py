"""The program that runs on each probed host::

    python -I -S …/cpulaunch/discovery/probe/remote.py

It reads requests (`probe.messages`) from stdin and prints the answers.  It uses only the standard library.
"""

from __future__ import annotations

import os
import sys

# With `-I -S`, Python doesn't find installed packages.
sys.path.append(__file__.rpartition("/cpulaunch/")[0])

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import cpulaunch
from cpulaunch import __version__
from cpulaunch.discovery.host.fabrics import find_fabrics
from cpulaunch.discovery.host.interfaces import interfaces_here, route_to
from cpulaunch.discovery.host.master_port import first_free
from cpulaunch.discovery.host.this_host import VERSION_FILES, facts_here, version_in
from cpulaunch.discovery.probe import messages
from cpulaunch.errors import CpulaunchError
from cpulaunch.wire import decode, encode

CONNECT_TIMEOUT = 2.0
"""Seconds within which the master's port must accept a connection."""


def main() -> None:
    with contextlib.ExitStack() as stack:
        for line in sys.stdin.buffer:
            match decode(line, messages.TO_PROBE):
                case messages.ProbeRequest() as request:
                    answer = probe(request)
                    if request.ports:
                        try:
                            listener = stack.enter_context(_listener(request.ports))
                            threading.Thread(target=_accept, args=(listener,), daemon=True).start()
                            answer = answer._replace(listening=listener.getsockname()[1])
                        except OSError as e:
                            answer = answer._replace(listen_error=os.strerror(e.errno) if e.errno else str(e))
                    _send(answer)
                case messages.ConnectRequest(addresses, port):
                    _send(messages.ConnectAnswer(_connect_errors(addresses, port)))


def probe(request: messages.ProbeRequest) -> messages.ProbeAnswer:
    """Collect this host's answer, except for the result of listening on a port."""
    connection = os.environ.get("SSH_CONNECTION", "").split()  # client's, then own address and port
    by_ssh = len(connection) == 4
    master, source = route_to(request.master)
    facts, facts_error = None, None
    try:
        environ = {**os.environ, **request.limits}
        found = facts_here(request.libraries, request.packages, environ)
        facts = replace(found, fabrics=find_fabrics(request.libraries)).to_json()
    except CpulaunchError as e:
        facts_error = str(e)
    return messages.ProbeAnswer(
        name=socket.gethostname(),
        time=time.time(),
        versions={
            "Python": ".".join(map(str, sys.version_info[:3])),
            "cpulaunch": f"{__version__}, code {_digest_of_code()}",
            **{name: version_in(request.packages, name) for name in VERSION_FILES},
        },
        digests={file: _digest(file) for file in request.identical},
        directory=os.path.isdir(request.directory),
        missing=[file for file in (*request.files, *request.optional) if not os.path.exists(file)],
        shm=_size("/dev/shm"),
        reached_at=connection[2] if by_ssh else None,
        reached_from=connection[0] if by_ssh else None,
        interfaces=[[i.name, i.address, i.prefix] for i in interfaces_here()],
        master=master,
        source=source,
        facts=facts,
        facts_error=facts_error,
        listening=None,
        listen_error=None,
    )


def _digest(file: str) -> str | None:
    try:
        with open(file, "rb") as f:
            return hashlib.sha256(f.read()).hexdigest()
    except OSError:
        return None


def _digest_of_code() -> str:
    """A digest of cpulaunch's modules and scripts, which detects modified copies of the same version."""
    package = os.path.dirname(cpulaunch.__file__)
    digest = hashlib.sha256()
    for directory, _, names in sorted(os.walk(package)):
        for name in sorted(names):
            if name.endswith((".py", ".sh")):
                file = os.path.join(directory, name)
                content = _digest(file) or "unreadable"
                digest.update(f"{os.path.relpath(file, package)} {content}\n".encode())
    return digest.hexdigest()[:12]


def _size(mounted: str) -> int | None:
    """The size of a file system in bytes; None if it doesn't exist."""
    try:
        stat = os.statvfs(mounted)
        return stat.f_blocks * stat.f_frsize
    except OSError:
        return None


def _listener(ports: Sequence[int]) -> socket.socket:
    """Listen on all addresses, like torch's store, at the first free one of ``ports``.  Raises OSError."""
    six = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if six else socket.AF_INET
    return first_free(
        ports,
        lambda port: socket.create_server(
            ("::" if six else "", port), family=family, dualstack_ipv6=six, backlog=4096
        ),
    )


def _accept(listener: socket.socket) -> None:
    """Accept and close connections, because the kernel may queue only 128."""
    with contextlib.suppress(OSError):  # closed
        while True:
            listener.accept()[0].close()


def _connect_errors(addresses: Iterable[str], port: int) -> dict[str, str | None]:
    """Try to connect to all ``addresses`` at once.  Return the error of each; None means success."""
    errors: dict[str, str | None] = dict.fromkeys(addresses, "no answer")

    def attempt(address: str) -> None:
        try:
            socket.create_connection((address, port), CONNECT_TIMEOUT).close()
            errors[address] = None
        except OSError as e:
            errors[address] = e.strerror or str(e)

    threads = [threading.Thread(target=attempt, args=(address,), daemon=True) for address in errors]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CONNECT_TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(errors)


def _send(answer: messages.Answer) -> None:
    sys.stdout.buffer.write(b"\n" + messages.MARK.encode() + encode(answer, messages.KINDS))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
