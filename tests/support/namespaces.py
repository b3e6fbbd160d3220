"""A cluster for tests on one Linux machine: every host is a set of namespaces with a real sshd.

A host has its own network, mount, process, UTS and IPC namespace: address, host name, /etc/hosts, /etc/ssh,
/run, /dev/shm, boot id, process 1.  Files are shared, as over NFS, unless a test hides some. The hosts are on
a bridge in a separate namespace, so this machine's network, ~/.ssh and /etc stay unchanged, no packet leaves
the cluster, and the cluster ends with the process that made it.

    with Hosts(("login", "node0", "node1")) as hosts:
        hosts.run("login", ["ssh", "node1", "hostname"])

As on many real hosts, each has a ``docker0`` with the same address everywhere, before the interface to the
others, which has another name on the last host. ``scripts/play_cluster.sh`` starts such a cluster to try.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

NETWORK = ipaddress.ip_network("10.213.88.0/24")
NETWORK_6 = ipaddress.ip_network("fd00:db8::/120")
DECOY = "172.17.0.1/16"
TOOLS = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
TIMEOUT = 10.0
"""Maximum seconds of a single step of building, or of a fault."""

_NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc")
SEARCH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"

# Process 1 of a host: makes the namespaces look like a host, starts sshd, and reaps orphaned processes.
_HOST = r"""
set -e
umask 022
hostname "$NAME"
ip link set lo up
mkdir "$D/cgroup"; mount --rbind /sys/fs/cgroup "$D/cgroup" || true
mount -t sysfs sysfs /sys
mount --rbind "$D/cgroup" /sys/fs/cgroup || true
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
mount --bind "$D/ssh" /etc/ssh
for name in hosts hostname machine-id shadow resolv.conf nsswitch.conf; do
    [ ! -e /etc/$name ] || mount --bind "$D/$name" /etc/$name
done
# Fast transports take hosts with the same boot id for one host, and try shared memory.
mount --bind "$D/boot_id" /proc/sys/kernel/random/boot_id
[ ! -d /root/.ssh ] || mount -t tmpfs -o mode=700 tmpfs /root/.ssh
echo up
read -r _                       # until the wires are in place
"$SSHD"
echo ready
trap : TERM INT HUP
while :; do sleep 86400 & wait $!; done
"""

_SSH_CONFIG = """\
Host *
  IdentityFile /etc/ssh/id
  IdentitiesOnly yes
  GlobalKnownHostsFile /etc/ssh/known_hosts
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  LogLevel ERROR
"""

_SSHD_CONFIG = """\
Port 22
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PidFile /run/sshd.pid
UsePAM no
UseDNS no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
PrintLastLog no
MaxStartups 200:30:400
"""


def why_not() -> str | None:
    """Return the reason why no such cluster can be made here, or None."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool, path=SEARCH)})
    if missing:
        return f"apt-get install {' '.join(missing)}"
    command = [
        "unshare",
        *_NAMESPACES,
        "--fork",
        "--mount-proc",
        "ip",
        "link",
        "add",
        "br0",
        "type",
        "bridge",
    ]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    return f"namespaces or bridges can't be made here: {tried.stderr.strip()}" if tried.returncode else None


class Hosts:
    """The hosts ``names``, which run during the block."""

    def __init__(
        self,
        names: Sequence[str] = ("login", "node0", "node1", "node2", "node3"),
        network: ipaddress.IPv4Network | ipaddress.IPv6Network = NETWORK,
    ) -> None:
        self.names, self.network = tuple(names), network
        numbers = network.hosts()
        self.addresses = {name: str(next(numbers)) for name in names}
        self.interfaces = dict.fromkeys(names, "eth0") | {self.names[-1]: "ens5"}
        self.directory = Path()
        # The pid on this machine of process 1 of each host, and of the switch.
        self._init: dict[str, int] = {}

    @classmethod
    def at(cls, directory: Path) -> Self:
        """The running cluster of another process, with its files in ``directory``."""
        state = json.loads((directory / "cluster.json").read_text())
        cluster = cls(state["names"])
        cluster.directory, cluster._init = directory, state["init"]
        return cluster

    # ---- up and down

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="cpulaunch-cluster-"))
        self._running: list[subprocess.Popen[str]] = []
        try:
            self._up()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for process in self._running:
            process.kill()  # process 1 ends with unshare, and the kernel ends the rest of the namespace
        for process in self._running:
            process.wait(TIMEOUT)
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
        for pid in self._init.values():
            until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"process {pid} to be gone")
        shutil.rmtree(self.directory)

    def _up(self) -> None:
        self._write_files()
        self._spawn("switch", "ip link set lo up; echo up; read -r _; echo ready; sleep infinity")
        for name in self.names:
            self._spawn(name, _HOST)
        started = dict(zip(("switch", *self.names), self._running, strict=True))
        for name, process in started.items():
            self._wait_for(process, name, "up")
            self._init[name] = int(
                Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
            )
        self._batch("switch", "link add br0 type bridge", "link set br0 up")
        for name in self.names:
            wire, interface = self._wire(name), self.interfaces[name]
            self._batch(
                name, "link add docker0 type bridge", f"addr add {DECOY} dev docker0", "link set docker0 up"
            )
            self._batch(
                "switch",
                f"link add {wire} type veth peer name {interface} netns {self._init[name]}",
                f"link set {wire} master br0 up",
            )
            self._batch(
                name,
                # By default, Linux checks for seconds whether another host has the same IPv6 address.
                f"addr add {self.addresses[name]}/{self.network.prefixlen} dev {interface}"
                f"{' nodad' if self.network.version == 6 else ''}",
                f"link set {interface} up",
            )
        for process in self._running:
            assert process.stdin
            process.stdin.write("wired\n")
            process.stdin.flush()
        for name, process in started.items():
            self._wait_for(process, name, "ready")
        (self.directory / "cluster.json").write_text(json.dumps({"names": self.names, "init": self._init}))

    def _write_files(self) -> None:
        def new_key(file: Path) -> None:
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "cluster", "-f", str(file)]
            subprocess.run(command, check=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)

        new_key(self.directory / "id")
        hosts = "127.0.0.1 localhost\n::1 localhost\n"
        hosts += "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        shadow = re.sub(r"^root:[^:]*", "root:*", Path("/etc/shadow").read_text(), flags=re.MULTILINE)
        # There is no DNS.  A lookup of ::ffff:10.213.88.2 would fail "temporarily", and torch would warn.
        there = Path("/etc/nsswitch.conf")
        switch = (
            re.sub(r"(?m)^hosts:.*\n?", "", there.read_text() if there.exists() else "") + "hosts: files\n"
        )
        for name in self.names:
            at = self.directory / name
            (at / "ssh").mkdir(parents=True)
            new_key(at / "ssh" / "host_key")
            # sshd refuses an account that is locked in shadow.
            files = {
                "hosts": hosts,
                "hostname": name + "\n",
                "machine-id": uuid.uuid4().hex + "\n",
                "boot_id": f"{uuid.uuid4()}\n",
                "shadow": shadow,
                "resolv.conf": "nameserver 127.0.0.1\n",
                "nsswitch.conf": switch,
                "ssh/ssh_config": _SSH_CONFIG,
                "ssh/sshd_config": _SSHD_CONFIG,
                "ssh/authorized_keys": (self.directory / "id.pub").read_text(),
            }
            for file, text in files.items():
                (at / file).write_text(text)
            (at / "shadow").chmod(0o600)
            shutil.copy(self.directory / "id", at / "ssh" / "id")
        self._know(self._host_keys())

    def _host_keys(self) -> dict[str, str]:
        files = {name: self.directory / name / "ssh" / "host_key.pub" for name in self.names}
        return {name: " ".join(file.read_text().split()[:2]) for name, file in files.items()}

    def _know(self, keys: Mapping[str, str]) -> None:
        known = "".join(f"{name},{self.addresses[name]} {key}\n" for name, key in keys.items())
        for name in self.names:
            (self.directory / name / "ssh" / "known_hosts").write_text(known)

    def _spawn(self, name: str, script: str) -> None:
        env = {
            "PATH": SEARCH,
            "NAME": name,
            "D": str(self.directory / name),
            "LC_ALL": "C",
            "SSHD": shutil.which("sshd", path=SEARCH) or "",
        }
        command = [
            "unshare",
            *_NAMESPACES,
            "--mount-proc",
            "--fork",
            "--kill-child=KILL",
            "bash",
            "-c",
            script,
        ]
        with open(self.directory / f"{name}.log", "w") as log:
            self._running.append(
                subprocess.Popen(
                    command,
                    env=env,
                    text=True,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            )

    def _wait_for(self, process: subprocess.Popen[str], name: str, word: str) -> None:
        assert process.stdout
        timer = threading.Timer(TIMEOUT, process.kill)
        timer.start()
        line = process.stdout.readline().strip()
        timer.cancel()
        if line != word:
            raise RuntimeError(
                f"{name} didn't get {word}: {(self.directory / f'{name}.log').read_text().strip()}"
            )

    # ---- use

    def command(self, name: str, argv: Sequence[str], directory: str | Path | None = None) -> list[str]:
        """Return the command that runs ``argv`` on a host as root, in ``directory`` (default: this one).

        Killing nsenter kills ``argv``'s process.
        """
        at = f"--wdns={directory or os.getcwd()}"
        return [*self._nsenter(name), at, "setpriv", "--pdeathsig=KILL", *argv]

    def run(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        timeout: float = 60.0,
        directory: str | Path | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` on a host, to its end."""
        with self.start(name, argv, directory=directory, env=env) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as e:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"{argv} hung on {name}:\n{out}\n{err}") from e
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def start(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        directory: str | Path | None = None,
        env: Mapping[str, str] = os.environ,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """Start ``argv`` on a host.  The caller ends it, and reads its stdout and stderr."""
        return subprocess.Popen(
            self.command(name, [str(word) for word in argv], directory),
            text=True,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**env, "HOSTNAME": name},
        )

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to a process of ``start``: nsenter's child, as nsenter forwards no signals. nsenter
        stops and continues with its child.
        """
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: bool(children.read_text().split()), "nsenter to have a child")
        os.kill(int(children.read_text().split()[0]), number)
        if number == signal.SIGCONT:
            process.send_signal(number)

    def processes(self, name: str | None = None) -> list[str]:
        """Command lines of the processes on a host, or on all hosts, without the host's own processes."""
        if name is None:
            return [line for each in self.names for line in self.processes(each)]
        if name not in self._init:
            return []
        command = self._nsenter(name, "ps", "-ww", "-eo", "pid=,stat=,args=")
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        lines = []
        for line in done.stdout.splitlines():
            pid, state, args = line.split(None, 2)
            if (
                pid != "1"
                and state[0] != "Z"
                and not args.startswith(("sleep 86400", "ps -ww", "sshd: /", "sshd: ["))
            ):
                lines.append(f"{name}: {pid} {args}")
        return lines

    def hostfile(self, file: Path, names: Sequence[str], slots: Sequence[int] | None = None) -> Path:
        """Write a hostfile with ``names``, and slots if given."""
        counts = [f" slots={count}" for count in slots] if slots else [""] * len(names)
        file.write_text("".join(f"{name}{count}\n" for name, count in zip(names, counts, strict=True)))
        return file

    # ---- helpers

    def _wire(self, name: str) -> str:
        """The switch's end of a host's cable; Linux gives a name 15 characters."""
        return f"p-{self.names.index(name)}"

    def _nsenter(self, name: str, *argv: str) -> list[str]:
        return ["nsenter", f"--target={self._init[name]}", *_NAMESPACES, *argv]

    def _inside(self, name: str, *argv: str) -> None:
        subprocess.run(
            self._nsenter(name, *argv),
            check=True,
            timeout=TIMEOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PATH": SEARCH},
        )

    def _batch(self, name: str, *lines: str) -> None:
        """Lines of ``ip`` in a host's network."""
        subprocess.run(
            ["nsenter", f"--target={self._init[name]}", "--net", "ip", "-batch", "-"],
            check=True,
            timeout=TIMEOUT,
            text=True,
            input="\n".join(lines) + "\n",
            env={**os.environ, "PATH": SEARCH},
        )


def until(true: object, what: str, limit: float = TIMEOUT) -> None:
    deadline = time.monotonic() + limit
    while not true():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit:.0f} s for {what}")
        time.sleep(0.005)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
