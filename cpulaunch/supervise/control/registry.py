"""Registry of a user's running jobs: a file in each job's directory, and a list of the user's jobs.

The file ``control.json`` says how to reach the launcher; only its owner can read it.  The list is a
directory with a file for each job that the user has started on this host.  It has the cores that the job is
pinned to if all its ranks run here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from cpulaunch.errors import ConfigError
from cpulaunch.model.cores import CoreSet
from cpulaunch.plan.plan import Plan
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.wire import observers_token

CONTROL_FILE = "control.json"
SCHEMA = 1

DISK_PATIENCE = 1.0
"""Maximum seconds to wait at the end of a job until the files are removed."""

MAX_FILE = 1 << 20
"""Maximum bytes to read from a file of the registry."""


class Contact(NamedTuple):
    """Contents of ``control.json``.

    ``token`` is the observers' token; ``started`` is in seconds since 1970.  ``machine`` (boot id and PID
    namespace) and ``start`` (start time of the process) distinguish the launcher from others with its PID.
    """

    job: str
    pid: int
    host: str
    machine: str
    start: str | None
    started: float
    address: str
    token: str
    command: Sequence[str]


class Announcement:
    """Registers a running job until ``withdraw``.

    A thread writes the files, so that a hanging disk does not block the launcher.  If they cannot be written,
    commands such as ``cpulaunch jobs`` do not find the job.
    """

    def __init__(
        self,
        directory: JobDirectory,
        job: str,
        address: str,
        token: str,
        plan: Plan,
        began: float,
    ) -> None:
        """``token`` is the job's token; ``began`` the start of its first attempt, on the monotonic clock."""
        token = observers_token(token)
        started = time.time() - (time.monotonic() - began)
        identity, command = _identity(os.getpid()), plan.program.argv
        control = Contact(job, started=started, address=address, token=token, command=command, **identity)
        self._cores = str(plan.pinned_here)
        self._directory, self._control = directory, control
        self._entry: Path | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._announce, daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            self._thread.start()

    def withdraw(self) -> None:
        """Remove the files, at the end of the job.  Waits at most ``DISK_PATIENCE`` seconds."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(DISK_PATIENCE)

    def _announce(self) -> None:
        self._write()
        self._over.wait()
        self._remove()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            document = json.dumps({"schema": SCHEMA, **self._control._asdict()}) + "\n"
            with self._directory.whole(CONTROL_FILE, 0o600) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(document.encode())
        with contextlib.suppress(OSError):
            if place := next(_lists(os.environ, make=True), None):
                entry = place / f"{self._control.job}.json"
                text = {
                    "schema": SCHEMA,
                    "job": self._control.job,
                    "directory": str(self._directory.path),
                    "cores": self._cores,
                    **_identity(self._control.pid),
                }
                new = entry.with_suffix(".new")
                new.write_text(json.dumps(text) + "\n")
                new.rename(entry)
                self._entry = entry

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(CONTROL_FILE, dir_fd=self._directory.fd)
        if self._entry:
            with contextlib.suppress(OSError):
                self._entry.unlink()


def read_contact(directory: Path) -> Contact | None:
    """Read a job's ``control.json``; None if it is missing, malformed, or another user's."""
    document = _read_json(directory / CONTROL_FILE) or {}
    fields: dict[str, Any] = {name: document.get(name) for name in Contact._fields}
    kinds: dict[str, Any] = {"pid": int, "start": (str, NoneType), "started": (int, float), "command": list}
    if not all(isinstance(value, kinds.get(name, str)) for name, value in fields.items()):
        return None
    return Contact(**{**fields, "command": [str(word) for word in fields["command"]]})


def is_here(contact: Contact) -> bool:
    """Whether the launcher runs on this host, in our PID namespace (so not in another container)."""
    return bool(contact.machine == _identity(0)["machine"])


def is_gone(contact: Contact) -> bool:
    """Whether the launcher is known to have ended.  Always False for a launcher on another host."""
    here = _identity(contact.pid)
    return bool(contact.machine == here["machine"] and contact.start != here["start"])


def has_other_network(contact: Contact) -> bool:
    """Whether a launcher on this host runs in another network namespace than we do."""
    if is_gone(contact):
        return False
    try:
        return os.readlink(f"/proc/{contact.pid}/ns/net") != os.readlink("/proc/self/ns/net")
    except OSError:
        return False


def is_stopped(contact: Contact) -> bool:
    """Whether the launcher is known to be stopped, for example by Ctrl-Z."""
    return is_here(contact) and not is_gone(contact) and _stat(contact.pid)[:1] == ["T"]


def listed_jobs(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories of the user's running jobs that were started on this host."""
    return [Path(entry["directory"]) for entry in _entries(environ)]


def jobs_on(cores: CoreSet, environ: Mapping[str, str]) -> dict[str, CoreSet]:
    """Return the user's running jobs that are pinned to some of this host's ``cores``, with these cores."""
    found = {}
    for entry in _entries(environ) if cores else ():
        with contextlib.suppress(ConfigError):
            shared = CoreSet.parse(str(entry.get("cores", ""))) & cores
            if shared and entry.get("machine") == _identity(0)["machine"]:
                found[str(entry.get("job"))] = shared
    return found


def _entries(environ: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the list's entries, and remove those of launchers that have ended."""
    for place in _lists(environ):
        for entry in place.glob("*.json"):
            document = _read_json(entry)
            if document is None or not isinstance(document.get("directory"), str):
                continue
            directory = Path(document["directory"])
            if _is_gone(document, directory):
                with contextlib.suppress(OSError):
                    entry.unlink()
            else:
                yield document


def _is_gone(document: Mapping[str, Any], directory: Path) -> bool:
    pid, machine = document.get("pid"), str(document.get("machine"))
    here = _identity(pid if isinstance(pid, int) else 0)
    if machine == here["machine"]:
        return bool(here["start"] is None or document.get("start") != here["start"])
    if document.get("host") == here["host"] and machine.split()[:1] != here["machine"].split()[:1]:
        return True  # started before this host's last boot
    # The launcher runs on another host that shares the list, or in a container.
    try:
        os.stat(directory / CONTROL_FILE)
    except OSError as e:
        return isinstance(e, (FileNotFoundError, NotADirectoryError))  # other errors don't tell
    return False


def _stat(pid: int) -> list[str]:
    """Read the fields of ``/proc/PID/stat`` from the state on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _identity(pid: int) -> dict[str, Any]:
    """Return values that identify a process, as its PID may be reused or exist on another host.

    ``start`` is None if there is no such process.  ``machine`` is this host's boot id and PID namespace.
    """
    start = next(iter(_stat(pid)[19:20]), None)
    with open("/proc/sys/kernel/random/boot_id") as file:
        machine = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return {"host": socket.gethostname(), "machine": machine, "pid": pid, "start": start}


def _lists(environ: Mapping[str, str], *, make: bool = False) -> Iterator[Path]:
    """Yield the directories that have a list and belong to the user; new jobs are added to the first one.

    ``make``: create the directories, but not in another user's $XDG_RUNTIME_DIR, which ``su`` leaves in the
    environment.
    """
    state = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME", "/"), ".local", "state")
    for parent in (environ.get("XDG_RUNTIME_DIR"), state):
        if not parent or not os.path.isabs(parent):
            continue
        place = Path(parent, "cpulaunch", "jobs")
        with contextlib.suppress(OSError):
            if make and (parent == state or os.stat(parent).st_uid == os.geteuid()):
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = os.lstat(place)
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid():
                yield place


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file; None if that fails, or if the file belongs to another user."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                return None
            document = json.loads(file.read(MAX_FILE))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
