"""Start a spawner.

On the launching host, the command line describes the job; on other hosts, the parent's first message does.
"""

from __future__ import annotations

import os
import shlex
import sys

from cpulaunch.agent.spawner.loop import ChildSpawner, RootSpawner
from cpulaunch.agent.spawner.messages import TO_CHILD, Host, Start, decode
from cpulaunch.errors import HostError
from cpulaunch.wire import MessageError

HERE = "here"
"""The word that marks the launching host in the hosts file."""


def main(argv: list[str]) -> int:
    """Start the agents and spawners, wait until all have ended, and return the exit code."""
    if argv:
        return RootSpawner(_from_command_line(argv), os.environ).run()
    line, rest = _first_line()
    if not line:
        return HostError.exit_code  # the parent has ended before its first message
    try:
        start = decode(line, TO_CHILD)
        if not isinstance(start, Start):
            raise MessageError("the first message is not `start`")
    except MessageError as e:
        print(f"this host has another version of cpulaunch: {e}", file=sys.stderr, flush=True)
        return HostError.exit_code
    return ChildSpawner(start, {**os.environ, **start.env}).run(rest)


def _from_command_line(argv: list[str]) -> Start:
    options, agent = argv[: (end := argv.index("--"))], argv[end + 1 :]
    ssh, file, reader, *forward = options
    hosts = read_hosts(file)
    elsewhere = not all(host.here for host in hosts)
    command = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0])]
    return Start(
        hosts=[list(host) for host in hosts],
        size=sum(host.ranks for host in hosts),
        reader=int(reader),
        agent=agent,
        ssh=[ssh, "-T", "-x"],
        remote=remote_line(command),
        env=_environment(forward[1::2]) if elsewhere else {},
    )


def read_hosts(file: str) -> list[Host]:
    """Read a file with a line ``NAME RANKS`` for each host, followed by HERE for the launching host."""
    hosts: list[Host] = []
    first = 0
    with open(file) as lines:
        for line in lines:
            name, ranks, *here = line.split()
            hosts.append(Host(name, first, int(ranks), here == [HERE]))
            first += int(ranks)
    return hosts


def remote_line(command: list[str]) -> str:
    """A line of sh that runs ``command``: the interpreter, its options and our script.

    If the interpreter or the script is missing, the line reports it on stderr and exits with 127.
    """
    checks = "; ".join(
        f"test -{kind} {shlex.quote(path)} || {{ echo {shlex.quote(f'there is no {path}')} >&2; exit 127; }}"
        for kind, path in (("x", command[0]), ("r", command[-1]))
    )
    return f"{checks}; exec {shlex.join(command)}"


def _environment(names: list[str]) -> dict[str, str]:
    """The variables to forward to other hosts: ``names`` and those that `to_forward` selects."""
    from cpulaunch.plan.environment import to_forward  # only the launching host needs this import

    return {name: os.environ[name] for name in (*to_forward(os.environ), *names) if name in os.environ}


def _first_line() -> tuple[bytes, bytes]:
    """Read the first line of stdin.  Return it with the bytes read after it; both are empty at the end."""
    data = bytearray()
    while b"\n" not in data:
        piece = os.read(0, 1 << 16)
        if not piece:
            return b"", b""
        data += piece
    line, _, rest = bytes(data).partition(b"\n")
    return line, rest
