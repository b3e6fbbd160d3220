"""Asking the launcher of a running job what it does, from another process, here or on another host."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TypeVar

from cpulaunch.errors import HostError
from cpulaunch.messages import (
    VERSION,
    Challenge,
    Lines,
    MessageError,
    Welcome,
    decode,
    encode,
    proof,
    same,
)
from cpulaunch.supervise.dumps import ANSWER_WITHIN
from cpulaunch.supervise.observer_messages import (
    FOR_OBSERVER,
    KINDS,
    LAUNCHER,
    OBSERVER,
    AllSeen,
    AskProfile,
    AskStacks,
    AskStatus,
    Observe,
    Profiled,
    ProfileProgress,
    Question,
    RankSeen,
    Status,
)
from cpulaunch.supervise.registry import Contact

CONNECT_WITHIN = 5.0
"""Seconds in which a launcher welcomes an observer."""

SILENCE = 120.0
"""Seconds in which a launcher that traces says something: merging many traces takes a while."""

T = TypeVar("T")


class Observer:
    """A connection to a job's launcher.  All raise HostError where it doesn't answer."""

    def __init__(self, contact: Contact) -> None:
        self._contact = contact
        self._lines, self._ready = Lines(), list[bytes]()
        self._salt = os.urandom(16).hex()
        self._socket: socket.socket | None = None

    def __enter__(self) -> Observer:
        try:
            self._connect()
            self._say(Observe(VERSION, self._salt, self._proof(OBSERVER, self._expect(Challenge).salt)))
            if not same(self._expect(Welcome).proof, self._proof(LAUNCHER, self._salt)):
                raise self._error(f"something else listens at {self._contact.address}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket:
            self._socket.close()

    def status(self) -> Status:
        """How far the job is."""
        self._say(AskStatus())
        return self._expect(Status)

    def stacks(self, *, native: bool) -> list[RankSeen]:
        """What all ranks are doing."""
        assert self._socket
        self._socket.settimeout(ANSWER_WITHIN + CONNECT_WITHIN)
        self._say(AskStacks(native))
        found = []
        while isinstance(seen := self._hear(), RankSeen):
            found.append(seen)
        if not isinstance(seen, AllSeen):
            raise self._error("it said something else than was asked")
        return found

    def profile(self, steps: int, ranks: list[int], progress: Callable[[str], None]) -> Profiled:
        """Have steps traced; ``progress`` gets lines on how far that is."""
        assert self._socket
        self._socket.settimeout(SILENCE)
        self._say(AskProfile(steps, ranks))
        while isinstance(said := self._hear(), ProfileProgress):
            if said.text:
                progress(said.text)
        if not isinstance(said, Profiled):
            raise self._error("it said something else than was asked")
        return said

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
        except (OSError, ValueError) as e:
            raise self._error(getattr(e, "strerror", None) or str(e)) from None

    def _proof(self, role: str, salt: str) -> str:
        return proof(self._contact.token, role, salt, 0)

    def _say(self, message: Question) -> None:
        assert self._socket
        try:
            self._socket.sendall(encode(message, KINDS))
        except OSError as e:
            raise self._error(e.strerror or str(e)) from None

    def _expect(self, kind: type[T]) -> T:
        if not isinstance(said := self._hear(), kind):
            raise self._error("it said something else than was asked")
        return said

    def _hear(self) -> object:
        assert self._socket
        try:
            while not self._ready:
                data = self._socket.recv(1 << 18)
                if not data:
                    raise self._error("it has hung up")
                self._ready += self._lines.feed(data)
            return decode(self._ready.pop(0), FOR_OBSERVER)
        except MessageError as e:
            raise self._error(str(e)) from None
        except OSError as e:
            raise self._error(e.strerror or str(e)) from None

    def _error(self, why: str) -> HostError:
        where = f"process {self._contact.pid} on {self._contact.host}"
        hint = "it may have ended, be another version of cpulaunch, or answer too many others"
        if self._contact.address.startswith("@") and self._contact.host != socket.gethostname():
            hint = f"the job runs on that host alone: ask it there (ssh {self._contact.host})"
        return HostError(
            f"the launcher of job {self._contact.job}, {where}, does not answer: {why}", hint=hint
        )
