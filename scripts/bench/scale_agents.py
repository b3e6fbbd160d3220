"""An ``mpiexec`` for `scale.py` that runs many agents per process, without programs.

    scale_agents.py … -n RANKS …

Each agent connects by `cpulaunch.agent.link`, reports that its program has started, prints ten lines, and
sends beats.  When the file ``fail`` exists in ``$SCALE_DIRECTORY``, one rank raises an exception; the
others end when the launcher asks them to.  Files in the directory show the agents' progress.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Any

from cpulaunch import messages, variables
from cpulaunch.agent.connection import Connection
from cpulaunch.agent.link import Link, LinkState

LINES = 10
PROCESSES = 4
PATIENCE = 30.0
PERIOD = PATIENCE / messages.BEATS_PER_TIMEOUT
LOOK = 0.05
"""Seconds between two checks of the clock and the file."""


class Agent(Link):
    """One rank's agent, with a simulated program."""

    def __init__(self, rank: int, selector: selectors.BaseSelector) -> None:
        super().__init__(os.environ[variables.CONTROL], os.environ[variables.TOKEN], rank, selector, PATIENCE)
        self.rank, self.lines, self.ended, self.released = rank, 0, False, False
        self.send(messages.Started(4711, "0", "", 1, []))

    def look(self, now: float) -> None:
        """Send the line or the beat that is due."""
        if self.released:
            return
        self.check_time()
        if self.state is LinkState.ABSENT:
            raise SystemExit(f"rank {self.rank}: {self.why}")
        if self.state is not LinkState.UP or self.ended:
            return
        if self.lines < LINES:
            self.lines += 1
            self.send(messages.Output(1, f"line {self.lines} of rank {self.rank}\n"))
        elif now >= self.last_sent + PERIOD:
            self.send(messages.Beat(7, 140, 0.5, 1.25, True, 4096, now))

    def ready(self, connection: Connection, events: int) -> list[Any]:
        """Handle the launcher's messages."""
        received = super().ready(connection, events)
        for message in received:
            if isinstance(message, messages.End):
                self.end(messages.Exit(None, message.signal, time.monotonic(), True, 0, None))
            elif isinstance(message, messages.AskTime):
                self.send(messages.Time(time.monotonic()))
            elif isinstance(message, messages.Release):
                self.released = True
                self.close()
        return []

    def fail(self) -> None:
        at = time.monotonic()
        self.send(messages.Failure("ValueError: no such luck", "train.py", 5, "", "", None, at, False, []))
        self.end(messages.Exit(1, None, at, False, 0, None))

    def end(self, end: messages.Exit) -> None:
        if not self.ended:
            self.ended = True
            self.send(end)


def main() -> int:
    if "--version" in sys.argv:
        print("HYDRA build details, played")
        return 0
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    size = int(sys.argv[sys.argv.index("-n") + 1])
    pids = []
    for number in range(PROCESSES):
        if (pid := os.fork()) == 0:
            play(range(number, size, PROCESSES), failing=size // 3)
            os._exit(0)
        pids.append(pid)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in pids])
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF for pid in pids)


def play(ranks: range, failing: int) -> None:
    """Run the agents of ``ranks`` until all have ended."""
    directory, number = Path(os.environ["SCALE_DIRECTORY"]), ranks.start
    selector = selectors.DefaultSelector()
    agents = []
    for rank in ranks:
        agents.append(Agent(rank, selector))
        turn(selector, 0.0)
    told = 0
    while selector.get_map() or told < 2:
        now = time.monotonic()
        for count, agent in enumerate(agents):
            agent.look(now)
            if count % 50 == 0:
                turn(selector, 0.0)
        turn(selector, LOOK)
        if told == 0 and all(agent.state is LinkState.UP for agent in agents):
            (directory / f"up-{number}").touch()
            told = 1
        if told == 1 and all(agent.lines == LINES for agent in agents):
            (directory / f"printed-{number}").touch()
            told = 2
        if failing in ranks and (directory / "fail").exists():
            (directory / "failed").write_text(str(time.monotonic()))
            agents[ranks.index(failing)].fail()
            failing = -1


def turn(selector: selectors.BaseSelector, timeout: float) -> None:
    for key, events in selector.select(timeout):
        key.data.ready(events)


if __name__ == "__main__":
    sys.exit(main())
