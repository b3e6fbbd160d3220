"""Probe hosts in parallel, over one connection each, within a bounded time."""

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

AT_ONCE = min(256, max(32, 8 * (os.cpu_count() or 1)))
"""The largest number of hosts that are probed at the same time.  Each costs some 50 ms of CPU time."""

MOST = max(256, AT_ONCE)
"""The largest number of open connections, including slow ones.  Each costs 6 MB of memory."""

LONG = 2.5
"""Seconds after which a slow host no longer counts for AT_ONCE.  It is most likely down, and uses no CPU."""

TELL_EVERY = 1.0
"""Seconds between two reports on the progress."""

FILES_OF_ONE = 8
"""The largest number of descriptors here that probing a host takes."""

_PROBE = str(Path(__file__).parent / "remote.py")


class Asked(NamedTuple):
    """The progress of probing: the number of hosts, of answers, and of failures so far."""

    hosts: int
    answered: int
    failed: int


Progress = Callable[[Asked | None], None]
"""Called with the progress at the start and about every second, and with None at the end."""


def probe_hosts(
    names: Sequence[str], here: frozenset[str], request: ProbeRequest, reach: Reach, progress: Progress
) -> dict[str, ProbeResponse]:
    """Probe all hosts: by ``reach``, or directly if the name is in ``here``.  The first is the master.

    Raises HostError if ``reach`` has no way to a host.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, FILES_OF_ONE * MOST), hard), hard))
    try:
        return event_loop.run(_probe_all(names, here, request, reach, progress))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # the job's programs inherit this limit


async def _probe_all(
    names: Sequence[str], here: frozenset[str], request: ProbeRequest, reach: Reach, progress: Progress
) -> dict[str, ProbeResponse]:
    gate = _Gate()
    program = [request.python, "-I", "-S", _PROBE]
    ways = [program if name in here else remote_command(reach, name, program, _PROBE) for name in names]
    hosts = [
        _ProbedHost(name, argv, argv is program, request if number == 0 else request._replace(ports=[]))
        for number, (name, argv) in enumerate(zip(names, ways, strict=True))
    ]
    master: asyncio.Future[ConnectRequest | None] = asyncio.get_running_loop().create_future()
    telling = asyncio.create_task(_tell(hosts, progress))
    try:
        # The connection to the master stays open until all others have tried to reach it.
        others = [host.visit(gate, master) for host in hosts[1:]]
        visit_master = hosts[0].visit_master(gate, master, [host.has_tried for host in hosts[1:]])
        responses = await asyncio.gather(visit_master, *others)
    finally:
        telling.cancel()
        progress(None)
        await asyncio.gather(*(host.end() for host in hosts))
    address = _masters_address(dict(zip(names, responses, strict=True)), request)
    return {
        host.name: response._replace(connect_error=host.connect_errors.get(address))
        for host, response in zip(hosts, responses, strict=True)
    }


async def _tell(hosts: Sequence[_ProbedHost], progress: Progress) -> None:
    while True:
        heard = [host.has_answered for host in hosts]
        progress(Asked(len(hosts), heard.count(True), heard.count(False)))
        await asyncio.sleep(TELL_EVERY)


class _Gate:
    """Limits the hosts probed at the same time to AT_ONCE, and to MOST with those that have taken LONG."""

    def __init__(self) -> None:
        self._all, self._busy = asyncio.Semaphore(MOST), asyncio.Semaphore(AT_ONCE)

    @contextlib.asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        async with self._all:
            await self._busy.acquire()
            with contextlib.ExitStack() as busy:
                busy.callback(self._busy.release)
                timer = asyncio.get_running_loop().call_later(LONG, busy.close)
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
        # On this host, SSH_CONNECTION is that of the user's login, and not of the probe.
        self.env = {k: v for k, v in os.environ.items() if k != "SSH_CONNECTION"} if is_here else None
        self.process: asyncio.subprocess.Process | None = None
        self.has_answered: bool | None = None  # None until known
        self.has_tried = asyncio.Event()  # set after its attempt to reach the master, or without one
        self.connect_errors: dict[str, str | None] = {}  # address of the master → error

    async def visit_master(
        self, gate: _Gate, master: asyncio.Future[ConnectRequest | None], others: Sequence[asyncio.Event]
    ) -> ProbeResponse:
        """Probe the master, give the others its addresses, and disconnect once all have tried them."""
        request = None
        try:
            async with gate.passed():
                response = await self._ask()
            if (answer := response.answer) and answer.listening:
                addresses = [self.request.master, *(row[1] for row in answer.interfaces)]
                request = ConnectRequest(list(dict.fromkeys(addresses)), answer.listening)
        finally:
            master.set_result(request)
        if request:
            await self._try_to_connect(request)  # the master is itself a client of its store
        for has_tried in others:
            await has_tried.wait()
        await self.end()  # in parallel with the others: srun takes as long to end as to start
        return response

    async def visit(self, gate: _Gate, master: asyncio.Future[ConnectRequest | None]) -> ProbeResponse:
        """Probe the host, let it try to reach the master, and disconnect."""
        async with gate.passed():
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
                limit=2 * MAX_LINE,  # a line has the mark, too
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
            error = f"its answer was not understood: {e}"
        self.connect_errors = dict.fromkeys(request.addresses, error)

    async def _exchange(self, request: Request) -> Answer | None:
        """Send ``request`` and return the answer; None if the process ends without one.

        Raises ValueError, mostly as MessageError, for an answer that can't be decoded.
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
        """End the process: close its stdin, which ends the remote program, and kill it after ``patience`` s.

        ssh must be killed if the host doesn't answer.
        """
        if self.process and self.process.returncode is None:
            assert self.process.stdin
            self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), patience)
            except asyncio.TimeoutError:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    self.process.kill()
                await self.process.wait()


def remote_command(reach: Reach, host: str, program: Sequence[str], script: str) -> Sequence[str]:
    """The command that runs ``program``, an interpreter with our ``script``, on ``host``.

    It exits with NO_PYTHON or NO_CPULAUNCH if the interpreter or the script is missing there.  Raises
    HostError if ``reach`` has no way to the host.
    """
    python, quoted = shlex.quote(program[0]), shlex.quote(script)
    checks = f"test -x {python} || exit {NO_PYTHON}; test -r {quoted} || exit {NO_CPULAUNCH}"
    argv = reach.command(host, f"{checks}; exec {shlex.join(program)}")
    if argv is None:
        raise HostError(f"{host}: this launcher has no way to other hosts", hint="--launcher mpirun uses ssh")
    return argv
