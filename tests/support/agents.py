"""Agents, started without a launcher, or with one that the test simulates."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cpulaunch import messages, variables
from cpulaunch.messages import FROM_AGENT, AgentMessage, LauncherMessage
from cpulaunch.model.cores import CoreSet
from cpulaunch.plan.placement import HostPlan, IdentityVariables, Placement, RankPlan
from cpulaunch.plan.request import HostRequest
from cpulaunch.wire import decode, encode, proof
from support.command import TIMEOUT, clean_environment

AGENT = Path(__file__).parent.parent.parent / "cpulaunch" / "agent" / "run_agent.py"
FIRST_CPU = min(os.sched_getaffinity(0))
TOKEN = "secret"

M = TypeVar("M")


def rank_plan(policy: str = "", cores: str = str(FIRST_CPU)) -> RankPlan:
    env = {"OMP_NUM_THREADS": "1"}
    return RankPlan(0, CoreSet.parse(cores), CoreSet(), CoreSet([0]), 1, memory_policy=policy, env=env)


def placement(directory: Path, rank: RankPlan | None = None, **different: Any) -> Placement:
    """Return the plan of a job of one rank on this host; ``assumed`` and ``host_env`` go to its HostPlan."""
    assumed, env = different.pop("assumed", False), different.pop("host_env", {})
    host = HostPlan("localhost", assumed, env, (rank or rank_plan(),))
    request = different.pop("request", HostRequest(allocator="default", openmp="default"))
    usual: dict[str, Any] = {
        "launcher": "local",
        "identity": IdentityVariables(*variables.LOCAL_IDENTITY),
        "agents_are_children": True,
        "daemon_outlives_link": False,
        "python": True,
        "directory": str(directory),
        "hosts": [host],
        "request": request.to_json(),
        "env": {},
        "hidden": [],
        "heartbeat_timeout": 30,
        "grace_period": 1,
        "lenient": False,
        "telemetry": True,
    }
    return Placement(**{**usual, **different})


def agent(
    placed: Placement,
    program: str,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
    rank: int = 0,
    size: int = 1,
    arguments: Sequence[str] = (),
    **options: Any,
) -> subprocess.Popen[str]:
    """The agent of one ``rank`` of ``size`` on this host.

    It runs the Python ``program``, or ``arguments``.
    """
    script = Path(placed.directory, "program.py")
    script.write_text(program)
    identity = dict(zip(placed.identity, map(str, (rank, size, rank, size)), strict=True))
    return subprocess.Popen(
        [python, "-I", "-S", AGENT, "--", *(arguments or (python, str(script)))],
        env=clean_environment(**{**identity, **placed.to_variables(), **(env or {})}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run_agent(
    placed: Placement, program: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run an agent without a launcher to its end.  Its output is its program's."""
    with agent(placed, program, env) as running:
        try:
            out, err = running.communicate(timeout=TIMEOUT)
        finally:
            running.kill()
    return subprocess.CompletedProcess(running.args, running.returncode, out, err)


class PlayedLauncher:
    """A launcher that the test simulates; one agent has connected to it."""

    def __init__(
        self,
        placed: Placement,
        program: str,
        hang_ups: int = 0,
        env: Mapping[str, str] | None = None,
        keeps_listening: bool = False,
        **options: Any,
    ) -> None:
        """Close the agent's first ``hang_ups`` connections; ``options`` are arguments of Popen.

        Without ``keeps_listening``, the launcher accepts no further connection.
        """
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(TIMEOUT)
        address = f"127.0.0.1:{self._server.getsockname()[1]}"
        control = {variables.CONTROL: address, variables.TOKEN: TOKEN}
        self.agent = agent(placed, program, {**control, **(env or {})}, **options)
        try:
            for _ in range(hang_ups):
                self._server.accept()[0].close()
            self.accept()
        except BaseException:
            self._reap()
            raise
        if not keeps_listening:
            self._server.close()

    def accept(self) -> None:
        """Accept the agent's next connection."""
        self._connection, _ = self._server.accept()
        self._connection.settimeout(TIMEOUT)
        self._file = self._connection.makefile("rb")

    def reset(self) -> None:
        """Break the connection as a firewall does."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.hang_up()

    def __enter__(self) -> PlayedLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self._reap()

    def _reap(self) -> None:
        self._server.close()
        self.agent.kill()
        self.agent.communicate(timeout=TIMEOUT)

    def welcome(self, token: str = TOKEN) -> messages.Hello:
        """Accept the agent, and prove the knowledge of ``token``."""
        self.say(messages.Challenge("salt"))
        hello = self.next(messages.Hello)
        self.say(messages.Welcome(proof(token, "launcher", hello.salt, hello.rank)))
        return hello

    def say(self, message: LauncherMessage) -> None:
        self.say_line(encode(message))

    def say_line(self, line: bytes) -> None:
        self._connection.sendall(line)

    def hear(self) -> AgentMessage | messages.Unknown:
        """The next message of the agent."""
        line = self._file.readline()
        assert line, "the agent has hung up"
        return decode(line, FROM_AGENT)

    def next(self, kind: type[M]) -> M:
        """The agent's next message of one kind.  Others are skipped."""
        until = time.monotonic() + TIMEOUT  # beats arrive as long as the agent runs
        while not isinstance(message := self.hear(), kind):
            assert time.monotonic() < until, f"no {kind.__name__}; the last that came is {message}"
        return message

    def wait_for_output(self, text: str) -> None:
        seen = ""
        while text not in seen:
            message = self.hear()
            assert not isinstance(message, messages.Exit), f"{message}, after saying {seen}"
            seen += message.data if isinstance(message, messages.Output) else ""

    def hang_up(self) -> None:
        self._file.close()
        self._connection.close()

    def end(self) -> tuple[int, str, str]:
        """Wait for the agent's end; return its exit code, and its own output."""
        out, err = self.agent.communicate(timeout=TIMEOUT)
        return self.agent.returncode, out, err
