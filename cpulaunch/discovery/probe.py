"""Ask hosts about themselves: all at once, over one ssh each, within a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpulaunch.discovery.interfaces import select_interfaces
from cpulaunch.discovery.probe_messages import (
    ANSWER_TIMEOUT,
    NO_CPULAUNCH,
    NO_PYTHON,
    ProbeRequest,
    ProbeResponse,
)
from cpulaunch.discovery.probe_remote import MARK
from cpulaunch.errors import HostError
from cpulaunch.launchers.reach import Reach

CONNECT_TIMEOUT = 2.5
"""Seconds in which all hosts try to reach the master."""

AT_ONCE = min(256, max(32, 8 * (os.cpu_count() or 1)))
"""Connections that are made at the same time; each costs this host some 50 ms of CPU time."""

_PROBE = str(Path(__file__).parent / "probe_remote.py")
_MAX_LINE = 1 << 24  # bytes; the topology of a big host takes 100 kB


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
        _ProbedHost(name, argv, argv is program, name == names[0], request)
        for name, argv in zip(names, ways, strict=True)
    ]
    try:
        responses = await asyncio.gather(*(host.ask(gate) for host in hosts))
        master = (responses[0].answer or {}).get("listening")
        if master:
            answers = {
                host.name: response.answer
                for host, response in zip(hosts, responses, strict=True)
                if response.answer
            }
            interface = select_interfaces(answers, request.interface)[names[0]]
            named = request.master != names[0]  # by the user, and so what the ranks will use
            address = request.master if named or not interface else interface.address
            tried = await asyncio.gather(*(host.try_to_connect(address, master) for host in hosts))
            responses = [replace(r, connect_error=e) for r, e in zip(responses, tried, strict=True)]
        return dict(zip(names, responses, strict=True))
    finally:
        await asyncio.gather(*(host.end() for host in hosts))


class _ProbedHost:
    """One host, and the process that we talk to it through."""

    def __init__(
        self, name: str, argv: Sequence[str], is_here: bool, is_master: bool, request: ProbeRequest
    ) -> None:
        self.name, self.argv = name, argv
        self.request = {
            "master": request.master,
            "directory": request.directory,
            "files": request.files,
            "identical": request.identical,
            "packages": request.packages,
            "libraries": request.libraries,
            "listen": request.port if is_master else None,
        }
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
            limit=_MAX_LINE,
            start_new_session=True,
        )
        answer = await self._exchange(self.request)
        if answer is not None:
            return ProbeResponse(answer, sent=sent, received=time.time())
        assert self.process.stderr
        error = (await self.process.stderr.read()).decode(errors="replace").strip()
        return ProbeResponse(None, await self.process.wait(), error, sent, time.time())

    async def try_to_connect(self, address: str | None, port: int) -> str | None:
        if not self.process or self.process.returncode is not None or self.request["listen"] is not None:
            return None
        try:
            answer = await asyncio.wait_for(self._exchange({"connect": [address, port]}), CONNECT_TIMEOUT)
        except asyncio.TimeoutError:
            return "no answer"
        return answer["connect_error"] if answer else "the connection to it was lost"

    async def _exchange(self, request: Mapping[str, Any]) -> Any:
        """The answer to ``request``; None where the process ends without one."""
        assert self.process
        assert self.process.stdin
        assert self.process.stdout
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            await self.process.stdin.drain()
        with contextlib.suppress(ValueError):  # garbled, or too long a line
            while line := await self.process.stdout.readline():
                if line.startswith(MARK.encode()):
                    return json.loads(line[len(MARK) :])
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
