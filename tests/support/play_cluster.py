"""A cluster of namespace hosts to try: a shell with a ``cluster`` command, whose end removes everything.

    play_cluster.sh [--hosts N] [COMMAND …]    make a cluster, run COMMAND (else a shell), take it down

In that shell:

    cluster HOST [COMMAND …]    run COMMAND (else a shell) on a host: login, node0, node1, …
    cluster ps                  what runs on the hosts
    cluster break HOST FAULT    until Enter: dropping, cut, unknown_key, changed_key, refusing_users,
                                without_sshd; power_off is for good
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.faults import Cluster  # noqa: E402
from support.namespaces import why_not  # noqa: E402

FAULTS = ("dropping", "cut", "unknown_key", "changed_key", "refusing_users", "without_sshd")

ENDING = (signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    if host := os.environ.get("PLAY_CLUSTER_HOST"):
        print(f"you are on the host {host}: `cluster` works in the shell around it (exit)", file=sys.stderr)
        return 2
    if directory := os.environ.get("PLAY_CLUSTER"):
        return _command(Cluster.at(Path(directory)), sys.argv[1:])
    parser = argparse.ArgumentParser(
        prog="play_cluster.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="besides the host called login (4)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if problem := why_not():
        print(f"no cluster: {problem}", file=sys.stderr)
        return 1
    for number in ENDING:
        signal.signal(number, _leave)
    with Cluster(("login", *(f"node{n}" for n in range(options.hosts)))) as cluster:
        return _play(cluster, options.command)


def _leave(*_: object) -> None:
    """Exit, to remove the hosts and their files.  Ignore further signals, as timeout(1) sends two."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(1)


def _play(cluster: Cluster, command: list[str]) -> int:
    tools = cluster.directory / "bin"
    tools.mkdir()
    ours = tools / "cluster"
    ours.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).resolve()))} "$@"\n'
    )
    ours.chmod(0o755)
    hostfile = cluster.hostfile(cluster.directory / "hostfile", cluster.names[1:])
    env = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "HOSTFILE": str(hostfile),
        "PLAY_CLUSTER": str(cluster.directory),
    }
    if not command:
        command = [os.environ.get("SHELL", "/bin/sh")]
        print(
            f"hosts: {' '.join(cluster.names)}; their hostfile is $HOSTFILE.  `cluster` says what can be done;\n"
            "try: cluster login cpulaunch hosts check -f $HOSTFILE.  The end of this shell is the end of them.",
            file=sys.stderr,
        )
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the command
    return subprocess.run(command, env=env).returncode


def _command(cluster: Cluster, words: list[str]) -> int:
    if words[:1] == ["ps"]:
        print("\n".join(cluster.processes()))
    elif words and words[0] in cluster.names:
        # Ctrl-C is for the command.  If it ended nsenter, the command would be killed at once.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        wanted = words[1:] or [os.environ.get("SHELL", "/bin/sh")]
        argv = cluster.command(words[0], ["env", "--default-signal=INT", *wanted])
        os.environ["HOSTNAME"] = os.environ["PLAY_CLUSTER_HOST"] = words[0]
        os.execvp(argv[0], argv)
    elif (
        len(words) == 3
        and words[0] == "break"
        and words[1] in cluster.names
        and words[2] in (*FAULTS, "power_off")
    ):
        if words[2] == "power_off":
            cluster.power_off(words[1])
            return 0
        with getattr(cluster, words[2])(words[1]):
            print(f"{words[1]}: {words[2]}; Enter heals it", file=sys.stderr)
            sys.stdin.readline()
    else:
        print((__doc__ or "").partition("In that shell:")[2].strip("\n"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
