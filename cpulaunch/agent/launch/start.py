"""Start a rank's program as planned: on its cores, with its memory policy, in its environment."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cpulaunch import variables
from cpulaunch.agent.launch.child import AffinityError, Program, set_memory_policy
from cpulaunch.agent.launch.environment import (
    Assignment,
    Identity,
    assignment,
    planned_preloads,
    program_arguments,
    program_environment,
)
from cpulaunch.agent.program import ledger_file
from cpulaunch.agent.program.master_port import keep_port
from cpulaunch.errors import HostError
from cpulaunch.messages import Started
from cpulaunch.model.cores import CoreSet
from cpulaunch.plan.placement import Placement
from cpulaunch.wording import cannot_run

if TYPE_CHECKING:
    import socket

_AGENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RUN_PROGRAM = os.path.join(_AGENT, "program", "run_program.py")

STACKS_SIGNAL = signal.SIGRTMAX - 3
"""The signal that makes a Python program write its stacks.  No other software is known to use it."""


class Planned(NamedTuple):
    """A program's part of the plan.

    ``memory_policy`` is written as in /proc, such as ``bind:0``, or empty for the kernel's default.
    ``threads`` is the value of OMP_NUM_THREADS.  ``preloads`` are the libraries that the plan adds to
    LD_PRELOAD.
    """

    cores: CoreSet
    comm_cores: CoreSet
    memory_policy: str
    threads: str
    preloads: list[str]


class Running(NamedTuple):
    """A running program, its part of the plan, and the ``message`` that reports its start to the launcher.

    After STACKS_SIGNAL, the program writes its stacks to the descriptor ``stacks``.
    """

    program: Program
    planned: Planned
    message: Started
    ledger: mmap.mmap | None = None  # only for Python programs, if memfd_create works
    stacks: int | None = None


def start_program(
    placement: Placement,
    identity: Identity,
    argv: list[str],
    streams: tuple[int, int, int],
    open_files: int,
) -> Running:
    """Start ``argv`` as planned for this rank.

    ``streams`` are descriptors for the program's stdout, its stderr and its reports to the agent.
    ``open_files`` is its soft limit of open files.  Raises HostError, or PlanError for an assumed host.
    """
    assigned, notes = _assigned_here(placement, identity)
    rank, host = assigned.rank, assigned.host.host
    name = placement.names.one(identity.rank)
    _enter(placement.directory, host)
    notes += _check_allowed(rank.cores, name, host, placement.lenient)
    policy = rank.memory_policy
    if policy and (why := _set_memory_policy(policy, placement.lenient)):
        notes.append(f"{name}: {why}")
        policy = ""
    env = _environment(placement, identity, assigned)
    argv = program_arguments(placement, identity, argv)
    port_socket = stacks = ledger_fd = ledger = None
    if placement.python:
        argv = [argv[0], RUN_PROGRAM, *argv[1:]]
        env[variables.REPORT_FD] = str(streams[2])
        stacks, (ledger_fd, ledger) = _offer_stacks_file(env), ledger_file.offer(env)
        port_socket = _keep_port(env, host) if identity.rank == 0 and not placement.instances else None
    preloads = planned_preloads(placement, assigned.host, os.environ)
    # Only one rank may read stdin.  Under hydra, the stdin of the other ranks never ends.
    reads = identity.rank == placement.stdin
    start = partial(Program, argv, env, streams=streams, stdin=reads, open_files=open_files)
    try:
        program = _start_on_cores(start, rank.cores, name, placement.lenient, notes)
    except OSError as e:
        raise HostError(cannot_run(f"{argv[0]} on {host}", e)) from None
    finally:
        if port_socket:
            port_socket.close()
        if ledger_fd is not None:
            os.close(ledger_fd)
    if (actual := _cores_of(program.pid)) not in (None, rank.cores):
        notes.append(f"{name} was put on CPUs {rank.cores}, but is on {actual}")
        if not placement.lenient:
            program.kill()
            raise HostError(notes[-1], hint="--lenient makes this a warning")
    planned = Planned(rank.cores, rank.comm_cores, policy, env.get("OMP_NUM_THREADS", ""), preloads)
    message = Started(program.pid, str(actual or rank.cores), str(rank.comm_cores), rank.threads, notes)
    return Running(program, planned, message, ledger, stacks)


def _start_on_cores(
    start: Callable[..., Program], cores: CoreSet, name: str, lenient: bool, notes: list[str]
) -> Program:
    """Start the program on ``cores``.

    If the kernel refuses the cores, raise HostError; with ``lenient``, add a note and start it without them.
    """
    try:
        return start(cores=cores)
    except AffinityError as e:
        notes.append(f"{name} can't be put on CPUs {cores}: {e.strerror}")
        if not lenient:
            hint = "a filter of system calls (seccomp) may forbid it; --lenient runs without"
            raise HostError(notes[-1], hint=hint) from None
        return start(cores=())


def _keep_port(env: dict[str, str], host: str) -> socket.socket | None:
    """Reserve MASTER_PORT, and pass the socket to the program through ``env``.

    None if `keep_port` reserves nothing.
    """
    if port_socket := keep_port(env, host):
        os.set_inheritable(port_socket.fileno(), True)
        env[variables.KEPT_PORT], env[variables.KEPT_PORT_FD] = env["MASTER_PORT"], str(port_socket.fileno())
    return port_socket


def _offer_stacks_file(env: dict[str, str]) -> int | None:
    """Create a memory file to which the program's processes append their stacks.

    None if the kernel refuses it.
    """
    try:
        fd = os.memfd_create("cpulaunch-stacks", 0)
    except OSError:
        return None
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    env[variables.STACKS] = f"{fd}:{int(STACKS_SIGNAL)}"
    return fd


def _enter(directory: str, host: str) -> None:
    try:
        os.chdir(directory)
    except OSError as e:
        raise HostError(f"working directory {directory} on {host}: {e.strerror}") from None


def _assigned_here(placement: Placement, identity: Identity) -> tuple[Assignment, list[str]]:
    """This rank's part of the plan, and notes.

    An assumed host is planned again with its actual facts.  Only its first rank returns the notes of the new
    plan.
    """
    assigned = assignment(placement, identity)
    if not assigned.host.assumed:
        return assigned, []
    from cpulaunch.agent.launch.rebind import facts_of_this_host, rebind_on_host

    users = {**os.environ, **placement.env}
    again = rebind_on_host(assigned.host, facts_of_this_host(), placement.request, users)
    return assigned._replace(host=again), [] if assigned.local_rank else list(again.notes)


def _environment(placement: Placement, identity: Identity, assigned: Assignment) -> dict[str, str]:
    env = program_environment(placement, identity, assigned, os.environ)
    if placement.instances:
        return env
    if len(placement.hosts) > 1 and "GLOO_SOCKET_IFNAME" not in env:
        from cpulaunch.agent.launch.rebind import select_interface

        return {**select_interface(env), **env}
    return env


def _check_allowed(cores: CoreSet, name: str, host: str, lenient: bool) -> list[str]:
    """Return a note if some of the planned cores are not available to this process.

    Raises HostError if none is available, or if ``lenient`` is false.
    """
    allowed = CoreSet(os.sched_getaffinity(0))
    if cores <= allowed:
        return []
    note = f"{name} is planned on CPUs {cores} of {host}, but may use only {allowed}"
    if not lenient or not cores & allowed:
        raise HostError(note, hint="is another program pinning ranks, or a cgroup smaller than planned?")
    return [note]


def _set_memory_policy(policy: str, lenient: bool) -> str:
    """Set the memory policy of this process, which the program inherits.

    If it can't be set, return the reason; raise HostError for ``bind`` without ``lenient``.
    """
    try:
        set_memory_policy(policy)
    except OSError as e:
        why = f"the memory policy {policy} can't be set: {e.strerror or e}"
        if not lenient and policy.startswith("bind"):
            raise HostError(why, hint="a container may forbid it; --lenient makes this a warning") from None
        return why
    return ""


def _cores_of(pid: int) -> CoreSet | None:
    try:
        return CoreSet(os.sched_getaffinity(pid))
    except OSError:
        return None  # the process has ended already
