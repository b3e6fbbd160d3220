"""Probe hosts in parallel, over one connection each, within a limited time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shlex
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cpulaunch.discovery.host.interfaces import select_interfaces
from cpulaunch.discovery.probe import event_loop
from cpulaunch.discovery.probe.messages import (
    ANSWER_TIMEOUT,
    FROM_PROBE,
    KINDS,
    MARK,
    NO_CPULAUNCH,
    NO_PYTHON,
    Answer,
    ConnectAnswer,
    ConnectRequest,
    ProbeAnswer,
    ProbeRequest,
    ProbeResponse,
    Request,
)
from cpulaunch.errors import HostError
from cpulaunch.launchers.reach import Reach
from cpulaunch.messages import Unknown
from cpulaunch.wire import MAX_LINE, MessageError, decode, encode

CONNECT_TIMEOUT = 2.5
"""Seconds within which a host must report whether it could connect to the master."""

MAX_BUSY = min(256, max(32, 8 * (os.cpu_count() or 1)))
"""The largest number of hosts probed at the same time, except slow ones.  Each takes 50 ms of CPU time."""

MAX_CONNECTIONS = max(256, MAX_BUSY)
"""The largest number of hosts probed at the same time, including slow ones.  Each takes 6 MB of memory."""

SLOW_AFTER = 2.5
"""Seconds after which a host counts as slow.  It is most likely down, so the probe uses no CPU."""

PROGRESS_INTERVAL = 1.0
"""Seconds between two reports on the progress."""

FILES_PER_HOST = 8
"""The largest number of file descriptors that probing a host takes."""

_PROBE = str(Path(__file__).parent / "remote.py")


class ProbeProgress(NamedTuple):
    """The progress of probing, in numbers of hosts."""

    hosts: int
    answered: int
    failed: int


Progress = Callable[[ProbeProgress | None], None]
"""Called with the progress at the start and about every second, and with None at the end."""


def probe_hosts(
    names: Sequence[str], here: frozenset[str], request: ProbeRequest, reach: Reach, progress: Progress
) -> dict[str, ProbeResponse]:
    """Probe all hosts by ``reach``; probe names in ``here`` directly.  The first host is the master.

    Raises HostError if ``reach`` can't run commands on a host.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (min(max(soft, FILES_PER_HOST * MAX_CONNECTIONS), hard), hard)
        )
    try:
        return event_loop.run(_probe_all(names, here, request, reach, progress))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # the job's programs inherit this limit


async def _probe_all(
    names: Sequence[str], here: frozenset[str], request: ProbeRequest, reach: Reach, progress: Progress
) -> dict[str, ProbeResponse]:
    gate = _Gate()
    program = [request.python, "-I", "-S", _PROBE]
    commands = [program if name in here else remote_command(reach, name, program, _PROBE) for name in names]
    hosts = [
        _ProbedHost(name, argv, argv is program, request if number == 0 else request._replace(ports=[]))
        for number, (name, argv) in enumerate(zip(names, commands, strict=True))
    ]
    master: asyncio.Future[ConnectRequest | None] = asyncio.get_running_loop().create_future()
    reporter = asyncio.create_task(_report_progress(hosts, progress))
    try:
        # The connection to the master stays open until all others have tried to connect to it.
        others = [host.visit(gate, master) for host in hosts[1:]]
        visit_master = hosts[0].visit_master(gate, master, [host.has_tried for host in hosts[1:]])
        responses = await asyncio.gather(visit_master, *others)
    finally:
        reporter.cancel()
        progress(None)
        await asyncio.gather(*(host.end() for host in hosts))
    address = _masters_address(dict(zip(names, responses, strict=True)), request)
    return {
        host.name: response._replace(connect_error=host.connect_errors.get(address))
        for host, response in zip(hosts, responses, strict=True)
    }


async def _report_progress(hosts: Sequence[_ProbedHost], progress: Progress) -> None:
    while True:
        answers = [host.has_answered for host in hosts]
        progress(ProbeProgress(len(hosts), answers.count(True), answers.count(False)))
        await asyncio.sleep(PROGRESS_INTERVAL)


class _Gate:
    """Limits the number of hosts probed at the same time to MAX_BUSY and MAX_CONNECTIONS."""

    def __init__(self) -> None:
        self._all, self._busy = asyncio.Semaphore(MAX_CONNECTIONS), asyncio.Semaphore(MAX_BUSY)

    @contextlib.asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        async with self._all:
            await self._busy.acquire()
            with contextlib.ExitStack() as busy:
                busy.callback(self._busy.release)
                timer = asyncio.get_running_loop().call_later(SLOW_AFTER, busy.close)
                try:
                    yield
                finally:
                    timer.cancel()


def _masters_address(responses: Mapping[str, ProbeResponse], request: ProbeRequest) -> str:
    """The future MASTER_ADDR: the user's choice, else the address of the master's interface."""
    answers = {name: response.answer for name, response in responses.items() if response.answer}
    first = next(iter(responses))
    if first not in answers or request.master != first:
        return request.master
    interface = select_interfaces(answers, request.interface)[first]
    return interface.address if interface else request.master


class _ProbedHost:
    """One host, and the process through which it is probed."""

    def __init__(self, name: str, argv: Sequence[str], is_here: bool, request: ProbeRequest) -> None:
        self.name, self.argv, self.request = name, argv, request
        # On this host, SSH_CONNECTION would describe the user's login instead of the probe.
        self.env = {k: v for k, v in os.environ.items() if k != "SSH_CONNECTION"} if is_here else None
        self.process: asyncio.subprocess.Process | None = None
        self.has_answered: bool | None = None  # None until known
        self.has_tried = asyncio.Event()  # it has tried to reach the master, or never will
        self.connect_errors: dict[str, str | None] = {}  # address of the master → error

    async def visit_master(
        self, gate: _Gate, master: asyncio.Future[ConnectRequest | None], others: Sequence[asyncio.Event]
    ) -> ProbeResponse:
        """Probe the master, pass its addresses to the others, and disconnect once all have tried them."""
        request = None
        try:
            async with gate.enter():
                response = await self._ask()
            if (answer := response.answer) and answer.listening:
                addresses = [self.request.master, *(row[1] for row in answer.interfaces)]
                request = ConnectRequest(list(dict.fromkeys(addresses)), answer.listening)
        finally:
            master.set_result(request)
        if request:
            await self._try_to_connect(request)  # the master is also a client of its own store
        for has_tried in others:
            await has_tried.wait()
        await self.end()
        return response

    async def visit(self, gate: _Gate, master: asyncio.Future[ConnectRequest | None]) -> ProbeResponse:
        """Probe the host, let it try to connect to the master, and disconnect."""
        async with gate.enter():
            try:
                response = await self._ask()
                if response.answer and (request := await master):
                    await self._try_to_connect(request)
            finally:
                self.has_tried.set()
            await self.end()
            return response

    async def _ask(self) -> ProbeResponse:
        sent = time.time()
        try:
            response = await asyncio.wait_for(self._start_and_ask(sent), ANSWER_TIMEOUT)
        except asyncio.TimeoutError:
            await self.end(patience=0)
            response = ProbeResponse(None, sent=sent, received=time.time())
        self.has_answered = response.answer is not None
        return response

    async def _start_and_ask(self, sent: float) -> ProbeResponse:
        pipe = asyncio.subprocess.PIPE
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.argv,
                env=self.env,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                limit=2 * MAX_LINE,  # MAX_LINE doesn't include MARK
                start_new_session=True,
            )
        except (OSError, RuntimeError) as e:  # no more files, processes or threads
            error = f"{self.argv[0]} can't be started here: {getattr(e, 'strerror', None) or e}"
            return ProbeResponse(None, None, error, sent, time.time())
        try:
            answer = await self._exchange(self.request)
        except ValueError as e:  # a malformed or too long line, or another version of cpulaunch
            await self.end()
            return ProbeResponse(None, 0, str(e), sent, time.time())
        if isinstance(answer, ProbeAnswer):
            return ProbeResponse(answer, sent=sent, received=time.time())
        assert self.process.stderr
        error = (await self.process.stderr.read()).decode(errors="replace").strip()
        return ProbeResponse(None, await self.process.wait(), error, sent, time.time())

    async def _try_to_connect(self, request: ConnectRequest) -> None:
        error = "the connection to it was lost"
        try:
            answer = await asyncio.wait_for(self._exchange(request), CONNECT_TIMEOUT)
            if isinstance(answer, ConnectAnswer):
                self.connect_errors = answer.errors
                return
        except asyncio.TimeoutError:
            error = "no answer"
        except ValueError as e:
            error = f"its answer is malformed: {e}"
        self.connect_errors = dict.fromkeys(request.addresses, error)

    async def _exchange(self, request: Request) -> Answer | None:
        """Send ``request`` and return the answer; None if the process ends without an answer.

        Raises ValueError, mostly as MessageError, for a malformed answer.
        """
        assert self.process
        assert self.process.stdin
        assert self.process.stdout
        with contextlib.suppress(OSError):
            self.process.stdin.write(encode(request, KINDS))
            await self.process.stdin.drain()
        while line := await self.process.stdout.readline():
            if line.startswith(MARK.encode()):
                answer = decode(line[len(MARK) :], FROM_PROBE)
                if isinstance(answer, Unknown):
                    raise MessageError(f"an answer of the unknown kind {answer.kind!r}")
                return answer
        return None

    async def end(self, patience: float = 1.0) -> None:
        """Close the process's stdin, which ends the remote program; kill it after ``patience`` seconds."""
        if self.process and self.process.returncode is None:
            assert self.process.stdin
            self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), patience)
            except asyncio.TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()


def remote_command(reach: Reach, host: str, program: Sequence[str], script: str) -> Sequence[str]:
    """The command that runs ``program``, an interpreter with our ``script``, on ``host``.

    The command exits with NO_PYTHON or NO_CPULAUNCH if the interpreter or the script is missing.  Raises
    HostError if ``reach`` can't run commands on the host.
    """
    python, quoted = shlex.quote(program[0]), shlex.quote(script)
    checks = f"test -x {python} || exit {NO_PYTHON}; test -r {quoted} || exit {NO_CPULAUNCH}"
    argv = reach.command(host, f"{checks}; exec {shlex.join(program)}")
    if argv is None:
        raise HostError(f"{host}: this launcher can't reach other hosts", hint="use --launcher ssh or mpirun")
    return argv
