"""Faults of the hosts of a cluster, on demand.

with Cluster() as cluster, cluster.dropping("node1"):
    …
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

from support.namespaces import SEARCH, TIMEOUT, Hosts, until


class Cluster(Hosts):
    """Hosts with faults.

    These are context managers that heal their fault; only ``power_off`` is permanent.
    """

    def power_off(self, name: str) -> None:
        """The host disappears without closing a connection, permanently."""
        self._batch("switch", f"link set {self._wire(name)} nomaster")
        os.kill(self._init.pop(name), signal.SIGKILL)

    @contextlib.contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """The cable is unplugged at the switch's end: nothing arrives, and the host doesn't notice."""
        self._batch("switch", f"link set {self._wire(name)} nomaster")
        try:
            yield
        finally:
            self._batch("switch", f"link set {self._wire(name)} master br0")

    @contextlib.contextmanager
    def second_network(self, *names: str) -> Iterator[dict[str, str]]:
        """These hosts have a second interface, ``rail1``, on a network of its own; yields its addresses.

        As in many distributions, they drop packets whose answers would leave through another interface.
        """
        filters = "/proc/sys/net/ipv4/conf/all/rp_filter"
        addresses = {name: f"10.213.89.{number}" for number, name in enumerate(names, 1)}
        self._batch("switch", "link add br1 type bridge", "link set br1 up")
        for name, address in addresses.items():
            wire = f"{self._wire(name)}-1"
            self._batch("switch", f"link add {wire} type veth peer name rail1 netns {self._init[name]}",
                        f"link set {wire} master br1 up")  # fmt: skip
            self._batch(name, f"addr add {address}/24 dev rail1", "link set rail1 up")
            self._inside(name, "sh", "-c", f"echo 1 > {filters}")
        try:
            yield addresses
        finally:
            for name in names:
                self._batch(name, "link del rail1")
                self._inside(name, "sh", "-c", f"echo 0 > {filters}")
            self._batch("switch", "link del br1")

    @contextlib.contextmanager
    def dropping(self, name: str) -> Iterator[None]:
        """The host runs, but answers no packet, as behind a firewall that drops packets."""
        self._batch(
            name, *(f"route add blackhole {address}" for n, address in self.addresses.items() if n != name)
        )
        try:
            yield
        finally:
            self._batch(
                name,
                *(f"route del blackhole {address}" for n, address in self.addresses.items() if n != name),
            )

    @contextlib.contextmanager
    def unroutable(self, name: str, other: str, address: str = "") -> Iterator[None]:
        """The host can send nothing to one other host, or to one of that host's addresses."""
        address = address or self.addresses[other]
        self._batch(name, f"route add blackhole {address}")
        try:
            yield
        finally:
            self._batch(name, f"route del blackhole {address}")

    @contextlib.contextmanager
    def parted(self, name: str, other: str) -> Iterator[None]:
        """Packets between two hosts are lost, and neither host notices."""
        pairs = ((name, other), (other, name))
        for a, b in pairs:
            at = f"{self.addresses[b]} dev {self.interfaces[a]}"
            self._batch(a, f"neigh replace {at} lladdr 02:00:00:00:00:fe nud permanent")
        try:
            yield
        finally:
            for a, b in pairs:
                self._batch(a, f"neigh del {self.addresses[b]} dev {self.interfaces[a]}")

    @contextlib.contextmanager
    def without_sshd(self, name: str, sessions: bool = False) -> Iterator[None]:
        """No sshd listens; with ``sessions``, open sessions end, too."""
        what = "kill $(cat /run/sshd.pid)" + ("; pkill -KILL -x sshd || true" if sessions else "")
        self._inside(name, "sh", "-c", what)
        try:
            yield
        finally:
            until(lambda: not self._listens(name), "sshd to be gone")
            self._inside(name, shutil.which("sshd", path=SEARCH) or "sshd")

    @contextlib.contextmanager
    def unknown_key(self, name: str) -> Iterator[None]:
        """No other host knows this host's key."""
        self._know({other: key for other, key in self._host_keys().items() if other != name})
        try:
            yield
        finally:
            self._know(self._host_keys())

    @contextlib.contextmanager
    def changed_key(self, name: str) -> Iterator[None]:
        """All hosts know another key for this one."""
        other = next(key for each, key in self._host_keys().items() if each != name)
        self._know({**self._host_keys(), name: other})
        try:
            yield
        finally:
            self._know(self._host_keys())

    @contextlib.contextmanager
    def refusing_users(self, name: str) -> Iterator[None]:
        """The host doesn't accept the user's key."""
        file = self.directory / name / "ssh" / "authorized_keys"
        before = file.read_text()
        file.write_text("")
        try:
            yield
        finally:
            file.write_text(before)

    @contextlib.contextmanager
    def hidden(self, name: str, path: str | Path) -> Iterator[None]:
        """The directory ``path`` looks empty on this host."""
        self._inside(name, "mount", "-t", "tmpfs", "tmpfs", str(path))
        try:
            yield
        finally:
            self._inside(name, "umount", "--lazy", str(path))

    @contextlib.contextmanager
    def replaced(self, name: str, path: str | Path, text: str) -> Iterator[None]:
        """The file ``path`` has another text on this host."""
        ours = self.directory / f"replaced-{uuid.uuid4().hex}"
        ours.write_text(text)
        ours.chmod(Path(path).stat().st_mode)
        self._inside(name, "mount", "--bind", str(ours), str(path))
        try:
            yield
        finally:
            self._inside(name, "umount", "--lazy", str(path))

    @contextlib.contextmanager
    def limited(self, name: str, cpus: str) -> Iterator[None]:
        """Processes started over ssh may use only these CPUs, as on a smaller host."""
        before = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        self._inside(name, "sh", "-c", f"taskset -cp {cpus} $(cat /run/sshd.pid) >/dev/null")
        try:
            yield
        finally:
            self._inside(name, "sh", "-c", f"taskset -cp {before} $(cat /run/sshd.pid) >/dev/null")

    @contextlib.contextmanager
    def shaped(self, name: str, rate: str) -> Iterator[None]:
        """The host sends at ``rate`` at most, such as ``1gbit``; needs the kernel's tbf."""
        at = ["dev", self.interfaces[name], "root"]
        self._inside(
            name, "tc", "qdisc", "add", *at, "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"
        )
        try:
            yield
        finally:
            self._inside(name, "tc", "qdisc", "del", *at)

    def _listens(self, name: str, port: int = 22) -> bool:
        probe = self._nsenter(name, "bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}")
        return subprocess.run(probe, capture_output=True, timeout=TIMEOUT).returncode == 0
