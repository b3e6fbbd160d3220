"""A client of a running job's launcher, for commands such as ``cpulaunch stacks``."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TypeVar

from cpulaunch.errors import HostError
from cpulaunch.messages import VERSION, Challenge, Welcome
from cpulaunch.supervise.control import observer_messages as protocol
from cpulaunch.supervise.control.registry import (
    CONTROL_FILE,
    Contact,
    has_other_network,
    is_here,
    is_stopped,
)
from cpulaunch.supervise.stalls.inquiry import ANSWER_WITHIN, Stacks
from cpulaunch.wire import Lines, MessageError, decode, encode, proof, same

CONNECT_WITHIN = 5.0
"""Timeout in seconds for the connection to a launcher, and for its answers."""

SILENCE = 120.0
"""Maximum seconds between two messages during a trace; merging many traces takes a while."""

T = TypeVar("T")


class Observer:
    """A connection to a job's launcher, as a context manager.

    All methods raise HostError if the launcher does not answer.
    """

    def __init__(self, contact: Contact) -> None:
        self._contact = contact
        self._lines, self._ready = Lines(), list[bytes]()
        self._salt = os.urandom(16).hex()
        self._socket: socket.socket | None = None

    def __enter__(self) -> Observer:
        try:
            self._connect()
            proof = self._proof(protocol.OBSERVER, self._expect(Challenge).salt)
            self._send(protocol.Observe(VERSION, self._salt, proof))
            if not same(self._expect(Welcome).proof, self._proof(protocol.LAUNCHER, self._salt)):
                raise self._error(f"something else listens at {self._contact.address}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket:
            self._socket.close()

    def status(self) -> protocol.Status:
        self._send(protocol.AskStatus())
        return self._expect(protocol.Status)

    def stacks(self, *, native: bool) -> list[protocol.RankStacks]:
        """Return the stacks of all ranks.  ``native``: with frames of C and C++."""
        assert self._socket
        self._socket.settimeout((2 if native else 1) * ANSWER_WITHIN + CONNECT_WITHIN)
        self._send(protocol.AskStacks(native))
        found, shared = [], Stacks()
        while isinstance(reply := self._receive(), protocol.RankStacks):
            found.append(reply._replace(processes=reply.processes and shared.share(reply.processes)))
        if not isinstance(reply, protocol.StacksEnd):
            raise self._error("it gave an unexpected answer")
        return found

    def profile(self, steps: int, ranks: list[int], progress: Callable[[str], None]) -> protocol.Profiled:
        """Trace the next ``steps`` of these ranks, or of all ranks if ``ranks`` is empty.

        ``progress`` is called with lines about the progress.
        """
        assert self._socket
        self._socket.settimeout(SILENCE)
        self._send(protocol.AskProfile(steps, ranks))
        while isinstance(reply := self._receive(), protocol.ProfileProgress):
            if reply.text:
                progress(reply.text)
        if not isinstance(reply, protocol.Profiled):
            raise self._error("it gave an unexpected answer")
        return reply

    def _connect(self) -> None:
        address = self._contact.address
        try:
            if address.startswith("@"):
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.settimeout(CONNECT_WITHIN)
                self._socket.connect(f"\0{address[1:]}")
                return
            host, _, port = address.rpartition(":")
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_WITHIN)
        except ConnectionRefusedError:
            if not address.startswith("@"):
                raise self._gone() from None
            if not is_here(self._contact):
                raise self._elsewhere() from None
            raise (self._in_container() if has_other_network(self._contact) else self._gone()) from None
        except (OSError, ValueError) as e:
            raise self._error(getattr(e, "strerror", None) or str(e)) from None

    def _proof(self, role: str, salt: str) -> str:
        return proof(self._contact.token, role, salt, 0)

    def _send(self, message: protocol.Question) -> None:
        assert self._socket
        try:
            self._socket.sendall(encode(message, protocol.KINDS))
        except OSError as e:
            raise self._error(e.strerror or str(e)) from None

    def _expect(self, kind: type[T]) -> T:
        if not isinstance(reply := self._receive(), kind):
            raise self._error("it gave an unexpected answer")
        return reply

    def _receive(self) -> object:
        assert self._socket
        try:
            while not self._ready:
                data = self._socket.recv(1 << 18)
                if not data:
                    raise self._error("it closed the connection")
                self._ready += self._lines.feed(data)
            return decode(self._ready.pop(0), protocol.FOR_OBSERVER)
        except MessageError as e:
            raise self._error(str(e)) from None
        except OSError as e:
            raise self._error(e.strerror or str(e)) from None

    @property
    def _launcher(self) -> str:
        return (
            f"the launcher of job {self._contact.job}, process {self._contact.pid} on {self._contact.host},"
        )

    def _error(self, why: str) -> HostError:
        if is_stopped(self._contact):
            return HostError(
                f"{self._launcher} is stopped", hint=f"`fg` or `kill -CONT {self._contact.pid}` continues it"
            )
        hint = "it may have ended, be another version of cpulaunch, or have too many connections"
        return HostError(f"{self._launcher} does not answer: {why}", hint=hint)

    def _gone(self) -> HostError:
        why = f"nothing listens at {self._contact.address} any more"
        hint = f"it was probably killed: {why}; {CONTROL_FILE} in the job's directory was left behind"
        return HostError(f"{self._launcher} is gone", hint=hint)

    def _in_container(self) -> HostError:
        enter = f"nsenter --net --target {self._contact.pid} cpulaunch …"
        hint = f"it is in another network namespace, such as a container's; use `{enter}`"
        return HostError(f"{self._launcher} can't be reached from here", hint=hint)

    def _elsewhere(self) -> HostError:
        host = self._contact.host
        hint = f"the job runs on {host} only; run this command there (ssh {host})"
        return HostError(f"{self._launcher} can't be reached from here", hint=hint)
