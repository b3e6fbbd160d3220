"""The agent: each rank's parent.

It learns which rank it is, sets the program's cores and environment, starts it, carries its output
and its exit status to the launcher, forwards signals, and ends it when the launcher is gone.
Standard library only: an agent costs a few megabytes, and starts in a few milliseconds.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import sys
import time

from cpulaunch import variables
from cpulaunch.agent.child import Ended, Program, adopt_orphans_and_die_with
from cpulaunch.agent.identity import Identity, identify
from cpulaunch.agent.link import Link
from cpulaunch.agent.out_of_memory import oom_kills, why_killed
from cpulaunch.errors import CpulaunchError, HostError
from cpulaunch.messages import (
    BEATS_PER_TIMEOUT,
    MAX_OUTPUT,
    REPORT_FD,
    UNREACHED,
    Lines,
    Message,
    decode,
    pack,
    unpack,
)
from cpulaunch.plan.placement import VARIABLE, HostSpec, Placement, RankSpec, unguard

MAX_PENDING = 1 << 20
"""Bytes on their way to the launcher from which on the program's output has to wait."""

_RUN_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_program.py")
_OURS_ALONE = (
    variables.TOKEN,
    variables.CONTROL,
    VARIABLE,
    *variables.LOCAL_IDENTITY,
)
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    adopt_orphans_and_die_with(signal.SIGTERM)
    try:
        placement = Placement.from_text(os.environ[VARIABLE])
        identity = identify(placement.launcher, placement.identity, os.environ)
    except (KeyError, ValueError, CpulaunchError) as e:
        print(f"cpulaunch: this process can't know its rank: {e!r}", file=sys.stderr, flush=True)
        return HostError.exit_code
    launcher = os.environ.get(variables.LAUNCHER_PID)
    if placement.agents_are_children and launcher and int(launcher) != os.getppid():
        return 128 + signal.SIGTERM  # it was gone before we could ask to die with it
    return Agent(placement, identity).run(unguard(sys.argv[sys.argv.index("--") + 1 :]))


class Agent:
    """One rank's agent."""

    def __init__(self, placement: Placement, identity: Identity) -> None:
        self.placement, self.identity = placement, identity
        self.selector = selectors.DefaultSelector()
        self.program: Program | None = None
        self.ended: Ended | None = None
        self.ended_at = time.time()
        self.oom_kills = oom_kills()
        self.refused = False
        self.done = False
        self.pipes: dict[int, int] = {}  # our end → stream (1, 2; 0: reports of the bootstrap)
        self.paused = False
        self.reports = Lines()
        self.rest = {1: b"", 2: b""}  # lines that have no end yet
        self.kill_at: float | None = None
        self.planned: tuple[str, str, str, str, str] | None = None
        self.told = False  # the launcher wants the program to end
        self.asked = 0  # the signal by which somebody else wants it
        self.left: tuple[int, float] | None = None  # code, time: it was about to end before that
        self.wake, wake_write = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_write, False)
        self.selector.register(self.wake, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (*_FORWARDED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the number arrives through the pipe
        control, token = os.environ.get(variables.CONTROL), os.environ.get(variables.TOKEN, "")
        self.period = placement.heartbeat_timeout / BEATS_PER_TIMEOUT
        self.link = (
            Link(control, token, identity.rank, self.selector, placement.heartbeat_timeout)
            if control
            else None
        )
        self.link_state = "connecting" if control else "absent"

    def run(self, program: list[str]) -> int:
        """Start ``program``, stay until it has ended, and return the exit code to end with."""
        try:
            self._start(program)
        except CpulaunchError as e:
            self._refuse(f"{e}; {e.hint}" if e.hint else str(e))
        gc.enable()
        while not self._finished():
            self._turn()
        return self._leave()

    # ---- starting

    def _start(self, program: list[str]) -> None:
        me, placement = self.identity, self.placement
        group_rank, host, rank = self._own_plan()
        name = placement.hosts[group_rank][0]
        try:
            os.chdir(placement.directory)
        except OSError as e:
            raise HostError(f"working directory {placement.directory} on {name}: {e.strerror}") from None
        cores = list(rank.cores)
        notes = self._check_cores(cores, name)
        policy = rank.memory_policy
        if policy and (why := self._set_memory_policy(policy)):
            notes.append(why)
            policy = ""
        env = {k: v for k, v in os.environ.items() if k not in _OURS_ALONE}
        env.update(placement.env)
        env.update(host.env)
        env.update(rank.env)
        if len(placement.hosts) > 1 and "GLOO_SOCKET_IFNAME" not in env:  # nobody looked, nobody said
            from cpulaunch.agent.network import select_interface

            env = {**select_interface(env), **env}
        env.update(
            RANK=str(me.rank),
            WORLD_SIZE=str(me.size),
            LOCAL_RANK=str(me.local_rank),
            LOCAL_WORLD_SIZE=str(me.local_size),
            GROUP_RANK=str(group_rank),
        )
        env.setdefault(variables.JOB_ID, "pasted")  # command.sh, started without a launcher
        if placement.python:
            program = [program[0], _RUN_PROGRAM, *program[1:]]
        streams = []
        for stream in (1, 2, 0):
            ours, theirs = os.pipe()
            streams.append(theirs)
            self.pipes[ours] = stream
            self.selector.register(ours, selectors.EVENT_READ)
        if placement.python:
            env[REPORT_FD] = str(streams[2])
        users = placement.env.get("LD_PRELOAD") or os.environ.get("LD_PRELOAD", "")
        added = set(host.env.get("LD_PRELOAD", "").split(":")) - set(users.replace(":", " ").split())
        threads = env.get("OMP_NUM_THREADS", "")
        self.planned = (str(rank.cores), str(rank.comm_cores), policy, threads, ":".join(sorted(added)))
        try:
            # Rank 0 alone has a stdin; under hydra, that of the others never ends.
            self.program = Program(
                program, env, cores, (streams[0], streams[1]), keep=[streams[2]], stdin=me.rank == 0
            )
        except OSError as e:
            raise HostError(f"{program[0]} can't be run on {name}: {e.strerror}") from None
        finally:
            for fd in streams:
                os.close(fd)
        actual = self._cores_of(self.program.pid)
        if actual is not None and actual != set(cores):
            notes.append(f"rank {me.rank} was put on CPUs {rank.cores}, but is on {_listed(actual)}")
            if not placement.lenient:
                self.program.kill()
                raise HostError(notes[-1], hint="--lenient makes this a warning")
        self._tell(
            {
                "type": "started",
                "pid": self.program.pid,
                "cores": _listed(actual or cores),
                "comm_cores": str(rank.comm_cores),
                "threads": rank.threads,
                "notes": notes,
            }
        )

    def _own_plan(self) -> tuple[int, HostSpec, RankSpec]:
        """Our host's number, and what is planned for it and for our rank."""
        me, placement = self.identity, self.placement
        total = sum(map(self._size_of, range(len(placement.hosts))))
        if total != me.size:
            raise HostError(f"{placement.launcher} started {me.size} ranks, but {total} were planned")
        first, group_rank = 0, 0
        while me.rank >= first + self._size_of(group_rank):
            first += self._size_of(group_rank)
            group_rank += 1
        name, number = placement.hosts[group_rank]
        host = placement.host_specs[number]
        if (me.rank - first, len(host.ranks)) != (me.local_rank, me.local_size):
            raise HostError(
                f"rank {me.rank} was planned as local rank {me.rank - first} of {len(host.ranks)} "
                f"on {name}, but {placement.launcher} made it local rank {me.local_rank} of {me.local_size}",
                hint="are two names in the hostfile the same host?",
            )
        if host.assumed:
            host = self._rebound(name, host)
        return group_rank, host, host.ranks[me.local_rank]

    def _size_of(self, group_rank: int) -> int:
        return len(self.placement.host_specs[self.placement.hosts[group_rank][1]].ranks)

    def _rebound(self, name: str, planned: HostSpec) -> HostSpec:
        """What this host's own topology and libraries give, as the plan could only guess at them."""
        from cpulaunch.agent.rebind import rebind_on_host

        users = {**os.environ, **self.placement.env}
        return rebind_on_host(name, planned, self.placement.request, users)

    def _set_memory_policy(self, policy: str) -> str:
        """Set it for us, and so for the program.  Returns why that can't be, where it doesn't matter much."""
        from cpulaunch.agent.memory_policy import set_memory_policy

        try:
            set_memory_policy(policy)
        except OSError as e:
            why = f"the memory policy {policy} can't be set: {e.strerror or e}"
            if not self.placement.lenient and policy.startswith("bind"):
                raise HostError(
                    why, hint="--lenient makes this a warning; in a container it may be forbidden"
                ) from None
            return f"rank {self.identity.rank}: {why}"
        return ""

    def _check_cores(self, cores: list[int], name: str) -> list[str]:
        allowed = os.sched_getaffinity(0)
        if set(cores) <= allowed:
            return []
        note = (
            f"rank {self.identity.rank} is planned on CPUs {_listed(cores)} of {name}, "
            f"but may use only {_listed(allowed)}"
        )
        if not self.placement.lenient or not set(cores) & allowed:
            raise HostError(note, hint="is another program pinning ranks, or a cgroup smaller than planned?")
        return [note]

    @staticmethod
    def _cores_of(pid: int) -> set[int] | None:
        try:
            return os.sched_getaffinity(pid)
        except OSError:
            return None  # it has ended already

    def _check(self, message: Message) -> None:
        """Compare what the program says of itself, and what it has by now, with the plan."""
        from cpulaunch.agent.verify import Planned, at_start, with_torch

        if not self.program or not self.planned or self.ended:
            return
        look = at_start if message["type"] == "ready" else with_torch
        found, complaints = look(self.program.pid, message, Planned(*self.planned))
        self._tell({"type": "found", **found})
        for complaint in complaints:
            note = f"rank {self.identity.rank} {complaint}"
            if not self.placement.lenient:
                self.program.kill()
                self._refuse(f"{note}; --lenient makes this a warning")
                return
            self._tell({"type": "note", "note": note})

    def _refuse(self, error: str) -> None:
        self.refused = True
        self.ended = Ended(HostError.exit_code, None)
        self._tell({"type": "refused", "error": error})

    # ---- the loop

    def _turn(self) -> None:
        ready = self.selector.select(self._timeout())
        self._look_at_program()  # before we hear that it should end
        for key, events in ready:
            if key.data is not None:
                for message in key.data.ready(events):
                    self._obey(message)
            elif key.fd == self.wake:
                for number in os.read(self.wake, 512):
                    if number != signal.SIGCHLD:
                        if number not in (signal.SIGUSR1, signal.SIGUSR2) and not self.ended:
                            self.asked = self.asked or number
                        self._end(number, self.placement.grace_period)
            elif key.fd in self.pipes:
                self._read(key.fd)
        now = time.monotonic()
        if self.link:
            self.link.check_time()
            if self.link_state != self.link.state:
                self._link_changed()
            if now >= self.link.last_sent + self.period:
                self.link.send({"type": "beat"})
            self._pause(self.link.pending > MAX_PENDING)
        self._look_at_program()
        if self.kill_at is not None and now >= self.kill_at and self.program:
            self.program.kill()
            self._look_at_program()
            self.kill_at = None

    def _look_at_program(self) -> None:
        if self.program and not self.ended and (ended := self.program.poll()):
            self.ended, self.ended_at = ended, time.time()
            # What it started may tidy up after a success, but not outlive a failure.
            self.kill_at = time.monotonic() + (self.placement.grace_period if ended.code == 0 else 0)

    def _timeout(self) -> float:
        now = time.monotonic()
        moments = [now + (1 if self.link and self.link.state == "connecting" else 60)]
        if self.link and self.link.state in ("connecting", "up"):
            moments.append(self.link.last_sent + self.period)
        if self.kill_at is not None:
            # Orphans that end give no sign to poll for: look ten times a second.
            moments.append(min(self.kill_at, now + 0.1) if self.ended else self.kill_at)
        return max(0.0, min(moments) - now)

    def _finished(self) -> bool:
        if self.program is None:
            return self.ended is not None
        if self.ended is None:
            return False
        return not self.program.left_behind()

    def _leave(self) -> int:
        """Carry over what is left, say goodbye, and wait until it was heard."""
        assert self.ended is not None
        self._pause(False)
        while self.pipes and self._drain():
            pass
        for fd in self.pipes:  # somebody who is no child of ours holds the other end
            self.selector.unregister(fd)
        self.pipes.clear()
        if self.program and not self.refused:
            code, number, at, told = *self.ended, self.ended_at, self.told
            if told and self.left:
                (code, at), number, told = self.left, None, False
            note = None
            if self.asked and not told:
                note = f"its agent got signal {self.asked}, from mpiexec or a batch system, not from us"
            elif number == signal.SIGKILL and not told:
                note = why_killed(self.program.pid, self.oom_kills)
            self._tell(
                {
                    "type": "exit",
                    "code": code,
                    "signal": number,
                    "at": at,
                    "told": told,
                    "asked": self.asked,
                    "note": note,
                }
            )
        # A launcher that is slow, or was stopped, will read it; one that is gone closes the link.
        while self.link and self.link.state in ("connecting", "up") and not self.done:
            self._turn()
        for stream, rest in self.rest.items():
            if rest:
                self._print(stream, b"\n")
        if self.link and self.link.cut_off and self.placement.daemon_outlives_link:
            os.kill(os.getppid(), signal.SIGTERM)  # its daemon would wait for its mpiexec for ever
        # The launcher knows how it ended; mpiexec needn't make a failure of its own of it.
        return 0 if self.done else self.ended.shell_code

    def _drain(self) -> bool:
        """Read what is in the pipes; False when nothing more is."""
        ready = [key.fd for key, _ in self.selector.select(0) if key.fd in self.pipes]
        for fd in ready:
            self._read(fd)
        return bool(ready)

    def _obey(self, message: Message) -> None:
        self.done = self.done or message["type"] == "done"
        if message["type"] == "end":
            self.told = self.told or not self.ended
            self._end(int(message["signal"]), float(message["grace"]))

    def _end(self, number: int, grace: float) -> None:
        if not self.program or self.ended:
            if number == signal.SIGKILL:
                self.kill_at = time.monotonic()
            return
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self.program.signal_group(number)
            return
        deadline = time.monotonic() + (0 if number == signal.SIGKILL else grace)
        self.kill_at = deadline if self.kill_at is None else min(self.kill_at, deadline)
        self.program.signal_group(number)

    def _link_changed(self) -> None:
        assert self.link is not None
        self.link_state = self.link.state
        if self.link_state == "lost":
            self.told = self.told or not self.ended
            self._end(signal.SIGTERM, self.placement.grace_period)
        elif self.link_state == "absent":
            address = os.environ[variables.CONTROL]
            self._print(
                2,
                f"{UNREACHED} at {address} ({self.link.why}): the job runs, "
                "but failures, logs and lost hosts are not watched\n".encode(),
            )
            waiting, self.link.waiting = self.link.waiting, []
            for message in waiting:
                self._tell(message)

    # ---- output

    def _read(self, fd: int) -> None:
        stream = self.pipes[fd]
        data = os.read(fd, MAX_OUTPUT)
        if not data:
            self.selector.unregister(fd)
            os.close(fd)
            del self.pipes[fd]
        elif stream == 0:
            self._read_report(data)
        else:
            self._tell({"type": "output", "stream": stream, "data": pack(data)})

    def _read_report(self, data: bytes) -> None:
        """What the bootstrap reports: a failure, or that the program is done.  Any child may write there."""
        try:
            for line in self.reports.feed(data):
                message = decode(line)
                if message["type"] == "failure":
                    self._tell({**message, "at": time.time(), "told": self.told})
                elif message["type"] == "leaving" and not self.told:
                    self.left = int(message["code"]), time.time()
                elif message["type"] in ("ready", "torch"):
                    self._check(message)
        except (ValueError, KeyError, TypeError):
            self.reports = Lines()

    def _tell(self, message: Message) -> None:
        """To the launcher, or, where there is none, to our own stdout and stderr."""
        if self.link and self.link.state in ("connecting", "up"):
            self.link.send(message)
        elif message["type"] == "output":
            self._print(message["stream"], unpack(message["data"]))
        elif message["type"] in ("refused", "note"):
            self._print(2, f"cpulaunch: {message.get('error') or message['note']}\n".encode())

    def _print(self, stream: int, data: bytes) -> None:
        *lines, rest = (self.rest[stream] + data).split(b"\n")
        if len(rest) > MAX_OUTPUT:
            lines, rest = [*lines, rest], b""
        self.rest[stream] = rest
        text = b"".join(b"[%d] %s\n" % (self.identity.rank, line) for line in lines)
        try:
            while text:
                text = text[os.write(stream, text) :]
        except OSError:
            pass  # nobody reads it

    def _pause(self, pause: bool) -> None:
        """Stop reading the program's output while too much of it waits; it blocks then, as on a pipe."""
        if pause == self.paused:
            return
        self.paused = pause
        for fd, stream in self.pipes.items():
            if stream and pause:
                self.selector.unregister(fd)
            elif stream:
                self.selector.register(fd, selectors.EVENT_READ)


def _listed(cores: object) -> str:
    from cpulaunch.model.cores import CoreSet

    return str(CoreSet(cores))  # type: ignore[arg-type]
