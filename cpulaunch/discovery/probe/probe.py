"""Ask hosts about themselves: all at once, over one ssh each, within a bounded time."""

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
"""Seconds in which all hosts try to reach the master."""

AT_ONCE = min(256, max(32, 8 * (os.cpu_count() or 1)))
"""Hosts that are asked at the same time, but for the master; each costs some 50 ms of CPU time."""

MOST = max(256, AT_ONCE)
"""Hosts that we may be connected to, or try to be, with those that take long; each costs 6 MB of memory."""

LONG = 2.5
"""Seconds after which a host makes room for another one: it is down most likely, and costs nothing."""

TELL_EVERY = 1.0
"""Seconds between two looks at how many have answered."""

FILES_OF_ONE = 8
"""Descriptors that asking a host takes here, for a moment."""

_PROBE = str(Path(__file__).parent / "remote.py")


class Asked(NamedTuple):
    """How far asking hosts is."""

    hosts: int
    answered: int
    failed: int


Progress = Callable[[Asked | None], None]
"""Is told at the start and about every second how far it is, and None at the end."""


def probe_hosts(
    names: Sequence[str], here: frozenset[str], request: ProbeRequest, reach: Reach, progress: Progress
) -> dict[str, ProbeResponse]:
    """Ask all hosts by ``reach``, but for those among the names of ``here``.  The first is the master.

    Raises HostError where there is no way to a host.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, FILES_OF_ONE * MOST), hard), hard))
    try:
        return event_loop.run(_probe_all(names, here, request, reach, progress))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # the job's programs are to have that


async def _probe_all(
    names: Sequence[str], here: frozenset[str], request: ProbeRequest, reach: Reach, progress: Progress
) -> dict[str, ProbeResponse]:
    gate = _Gate()
    program = [request.python, "-I", "-S", _PROBE]
    ways = [program if name in here else remote_command(reach, name, program, _PROBE) for name in names]
    hosts = [
        _ProbedHost(name, argv, argv is program, request if number == 0 else request._replace(port=None))
        for number, (name, argv) in enumerate(zip(names, ways, strict=True))
    ]
    master: asyncio.Future[ConnectRequest | None] = asyncio.get_running_loop().create_future()
    telling = asyncio.create_task(_tell(hosts, progress))
    try:
        # The master goes first, and stays until all others have tried to reach it.
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
    """Lets ``AT_ONCE`` hosts be asked at the same time, and ``MOST`` with those that have taken ``LONG``."""

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
    """Where the ranks will meet: what the user has named, or else the address of the master's interface."""
    answers = {name: response.answer for name, response in responses.items() if response.answer}
    first = next(iter(responses))
    if first not in answers or request.master != first:
        return request.master
    interface = select_interfaces(answers, request.interface)[first]
    return interface.address if interface else request.master


class _ProbedHost:
    """One host, and the process that we talk to it through."""

    def __init__(self, name: str, argv: Sequence[str], is_here: bool, request: ProbeRequest) -> None:
        self.name, self.argv, self.request = name, argv, request
        # Whoever is logged in here by ssh has that connection in the environment: it isn't ours.
        self.env = {k: v for k, v in os.environ.items() if k != "SSH_CONNECTION"} if is_here else None
        self.process: asyncio.subprocess.Process | None = None
        self.has_answered: bool | None = None  # None as long as that isn't known
        self.has_tried = asyncio.Event()  # to reach the master, or never will
        self.connect_errors: dict[str, str | None] = {}  # why it couldn't reach the master, by the address

    async def visit_master(
        self, gate: _Gate, master: asyncio.Future[ConnectRequest | None], others: Sequence[asyncio.Event]
    ) -> ProbeResponse:
        """Ask the master, tell the others at which addresses to try it, and hang up when they have."""
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
            await self._try_to_connect(request)  # it is a client of the store there, too
        for has_tried in others:
            await has_tried.wait()
        await self.end()  # while they end: srun takes as long for that as for the start
        return response

    async def visit(self, gate: _Gate, master: asyncio.Future[ConnectRequest | None]) -> ProbeResponse:
        """Ask the host, let it try to reach the master, and hang up."""
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
                limit=2 * MAX_LINE,  # the mark, too
                start_new_session=True,
            )
        except (OSError, RuntimeError) as e:  # no more files, processes or threads
            error = f"{self.argv[0]} can't be started here: {getattr(e, 'strerror', None) or e}"
            return ProbeResponse(None, None, error, sent, time.time())
        try:
            answer = await self._exchange(self.request)
        except ValueError as e:  # garbled, too long a line, or of another cpulaunch
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
        """The answer to ``request``; None where the process ends without one.

        Raises ValueError (MessageError, most often) for what can't be understood.
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
        """Its stdin's end is the program's; ssh to a host that doesn't answer must be killed."""
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

    Its exit code says which of the two is missing there: NO_PYTHON or NO_CPULAUNCH.  Raises HostError where
    there is no way to the host.
    """
    python, quoted = shlex.quote(program[0]), shlex.quote(script)
    checks = f"test -x {python} || exit {NO_PYTHON}; test -r {quoted} || exit {NO_CPULAUNCH}"
    argv = reach.command(host, f"{checks}; exec {shlex.join(program)}")
    if argv is None:
        raise HostError(f"{host}: this launcher has no way to other hosts", hint="--launcher mpirun uses ssh")
    return argv
