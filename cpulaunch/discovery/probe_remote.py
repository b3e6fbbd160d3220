"""Probe a host from inside.  Run on each host, over ssh::

    python -I -S …/cpulaunch/discovery/probe_remote.py

Standard library only.  It speaks in lines: reads a request, a JSON object; answers with ``MARK`` and a JSON
object, as what rc files print may come before.  A second request, ``{"connect": [address, port]}``, is
whether the master can be reached.  It ends when its stdin does.
"""

from __future__ import annotations

import os
import sys

# `-I -S` keeps the user's modules, variables and .pth files out; so the path to cpulaunch must be added.
sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import hashlib
import json
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cpulaunch import __version__
from cpulaunch.discovery.fabrics import find_fabrics
from cpulaunch.discovery.interfaces import interfaces_here, route_to
from cpulaunch.discovery.this_host import facts_here
from cpulaunch.errors import CpulaunchError

MARK = "cpulaunch-answer: "

CONNECT_TIMEOUT = 2.0
"""Seconds that the master's port has to answer."""

_VERSION_FILES = {
    "torch": ("torch/version.py", "__version__"),
    "intel_extension_for_pytorch": ("intel_extension_for_pytorch/_version.py", "__version__"),
}
"""Where a package says its version, as importing it takes a second and more."""


def main() -> None:
    request = json.loads(sys.stdin.readline())
    answer = probe(request)
    listener = None
    if request["listen"] is not None:
        try:
            listener = _listener(request["listen"])
            answer["listening"] = listener.getsockname()[1]
        except OSError as e:
            answer["listen_error"] = e.strerror or str(e)
    _send(answer)
    for line in sys.stdin:
        address, port = json.loads(line)["connect"]
        _send({"connect_error": _connect_error(address, port)})
    if listener:
        listener.close()


def probe(request: Mapping[str, Any]) -> dict[str, Any]:
    """What is true of this host.

    ``request``: ``master`` (a name or address, or None), ``directory`` and ``files`` (which should be
    there), ``identical`` (files of which the digest is wanted), ``packages`` (where Python imports from),
    ``libraries`` (directories to look for libraries in).
    """
    connection = os.environ.get("SSH_CONNECTION", "").split()  # theirs, their port, ours, our port
    answer: dict[str, Any] = {
        "name": socket.gethostname(),
        "time": time.time(),
        "versions": {
            "Python": ".".join(map(str, sys.version_info[:3])),
            "cpulaunch": __version__,
            **{name: _version(*where, request["packages"]) for name, where in _VERSION_FILES.items()},
        },
        "digests": {file: _digest(file) for file in request["identical"]},
        "directory": os.path.isdir(request["directory"]),
        "missing": [file for file in request["files"] if not os.path.exists(file)],
        "shm": _size("/dev/shm"),
        "reached_at": connection[2] if len(connection) == 4 else None,
        "reached_from": connection[0] if len(connection) == 4 else None,
        "interfaces": [[i.name, i.address, i.prefix] for i in interfaces_here()],
    }
    if request["master"]:
        answer["master"], answer["source"] = route_to(request["master"])
    try:
        facts = facts_here(request["libraries"], request["packages"])
        answer["facts"] = replace(facts, fabrics=find_fabrics(request["libraries"])).to_json()
    except CpulaunchError as e:
        answer["facts_error"] = str(e)
    return answer


def _version(file: str, name: str, directories: Iterable[str]) -> str | None:
    """The text that ``file``, in the first of ``directories`` that has it, assigns to ``name``."""
    for directory in directories:
        try:
            with open(os.path.join(directory, file), encoding="utf-8") as f:
                for line in f:
                    left, equals, right = line.partition("=")
                    if equals and left.split(":")[0].strip() == name:
                        return right.strip().strip("'\"")
        except OSError:
            continue
    return None


def _digest(file: str) -> str | None:
    try:
        with open(file, "rb") as f:
            return hashlib.sha256(f.read()).hexdigest()
    except OSError:
        return None


def _size(mounted: str) -> int | None:
    """Bytes that a file system holds."""
    try:
        stat = os.statvfs(mounted)
        return stat.f_blocks * stat.f_frsize
    except OSError:
        return None


def _listener(port: int) -> socket.socket:
    """Listen as torch's Store will, on all addresses; port 0 takes a free one."""
    six = socket.has_dualstack_ipv6()
    address = ("::" if six else "", port)
    family = socket.AF_INET6 if six else socket.AF_INET
    return socket.create_server(address, family=family, dualstack_ipv6=six, backlog=4096)


def _connect_error(address: str, port: int) -> str | None:
    try:
        socket.create_connection((address, port), CONNECT_TIMEOUT).close()
    except OSError as e:
        return e.strerror or str(e)
    return None


def _send(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
