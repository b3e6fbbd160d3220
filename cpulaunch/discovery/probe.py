"""Ask hosts about themselves: all at once, over one ssh each, within a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from cpulaunch.discovery.interfaces import select_interfaces
from cpulaunch.discovery.probe_messages import (
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
from cpulaunch.messages import MAX_LINE, MessageError, Unknown, decode, encode

CONNECT_TIMEOUT = 2.5
"""Seconds in which all hosts try to reach the master."""

AT_ONCE = min(256, max(32, 8 * (os.cpu_count() or 1)))
"""Connections that are made at the same time; each costs this host some 50 ms of CPU time."""

_PROBE = str(Path(__file__).parent / "probe_remote.py")


def probe_hosts(
    names: Sequence[str], here: frozenset[str], request: ProbeRequest, reach: Reach
) -> dict[str, ProbeResponse]:
    """Ask all hosts by ``reach``, but for those among the names of ``here``.  The first is the master.

    Raises HostError where there is no way to a host.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4 * len(names) + 64), hard), hard))
    return asyncio.run(_probe_all(names, here, request, reach))


async def _probe_all(
    names: Sequence[str], here: frozenset[str], request: ProbeRequest, reach: Reach
) -> dict[str, ProbeResponse]:
    gate = asyncio.Semaphore(AT_ONCE)
    program = [request.python, "-I", "-S", _PROBE]
    ways = [program if name in here else _command(reach, name, program) for name in names]
    hosts = [
        _ProbedHost(name, argv, argv is program, request if number == 0 else request._replace(port=None))
        for number, (name, argv) in enumerate(zip(names, ways, strict=True))
    ]
    try:
        responses = await asyncio.gather(*(host.ask(gate) for host in hosts))
        port = responses[0].answer and responses[0].answer.listening
        if port:
            answers = {
                host.name: response.answer
                for host, response in zip(hosts, responses, strict=True)
                if response.answer
            }
            interface = select_interfaces(answers, request.interface)[names[0]]
            named = request.master != names[0]  # by the user, and so what the ranks will use
            address = request.master if named or not interface else interface.address
            tried = await asyncio.gather(*(host.try_to_connect(address, port) for host in hosts))
            responses = [r._replace(connect_error=e) for r, e in zip(responses, tried, strict=True)]
        return dict(zip(names, responses, strict=True))
    finally:
        await asyncio.gather(*(host.end() for host in hosts))


class _ProbedHost:
    """One host, and the process that we talk to it through."""

    def __init__(self, name: str, argv: Sequence[str], is_here: bool, request: ProbeRequest) -> None:
        self.name, self.argv, self.request = name, argv, request
        # Whoever is logged in here by ssh has that connection in the environment: it isn't ours.
        self.env = {k: v for k, v in os.environ.items() if k != "SSH_CONNECTION"} if is_here else None
        self.process: asyncio.subprocess.Process | None = None

    async def ask(self, gate: asyncio.Semaphore) -> ProbeResponse:
        async with gate:
            sent = time.time()
            try:
                return await asyncio.wait_for(self._ask(sent), ANSWER_TIMEOUT)
            except asyncio.TimeoutError:
                await self.end(patience=0)
                return ProbeResponse(None, sent=sent, received=time.time())

    async def _ask(self, sent: float) -> ProbeResponse:
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *self.argv,
            env=self.env,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=2 * MAX_LINE,  # the mark, too
            start_new_session=True,
        )
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

    async def try_to_connect(self, address: str | None, port: int) -> str | None:
        if not self.process or self.process.returncode is not None or self.request.port is not None:
            return None
        try:
            answer = await asyncio.wait_for(self._exchange(ConnectRequest(address, port)), CONNECT_TIMEOUT)
        except asyncio.TimeoutError:
            return "no answer"
        except ValueError as e:
            return f"its answer was not understood: {e}"
        return answer.error if isinstance(answer, ConnectAnswer) else "the connection to it was lost"

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
                self.process.kill()
                await self.process.wait()


def _command(reach: Reach, host: str, program: Sequence[str]) -> Sequence[str]:
    argv = reach.command(host, _for_any_shell(program))
    if argv is None:
        raise HostError(f"{host}: this launcher has no way to other hosts", hint="--launcher mpirun uses ssh")
    return argv


def _for_any_shell(program: Sequence[str]) -> str:
    """A line that says which part of ``program`` is missing, for a login shell of any kind."""
    python, script = shlex.quote(program[0]), shlex.quote(program[-1])
    checks = f"test -x {python} || exit {NO_PYTHON}; test -r {script} || exit {NO_CPULAUNCH}"
    return f"exec /bin/sh -c {shlex.quote(f'{checks}; exec {shlex.join(program)}')}"
