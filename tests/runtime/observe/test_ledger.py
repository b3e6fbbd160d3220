"""The ledgers of real ranks.  The test has their memory, as agents do."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command import TIMEOUT, clean_environment
from support.marks import repeat

from cpulaunch import ledger, variables
from cpulaunch.agent.launch.start import RUN_PROGRAM
from cpulaunch.agent.program import ledger_file

pytestmark = pytest.mark.slow

INTEL = os.environ.get("CPULAUNCH_TEST_INTEL")
no_intel = pytest.mark.skipif(not INTEL, reason="no CPULAUNCH_TEST_INTEL")
OLD_TORCH = pytest.param(f"{INTEL}/python", marks=no_intel, id="torch 2.8")

# ccl writes its ledgers in C++.  gloo's are copied from torch's recorder, whose format differs in torch 2.8.
each_backend = pytest.mark.parametrize("backend", [repeat("ccl"), "gloo"])
each_torch = pytest.mark.parametrize(
    "python", [pytest.param(sys.executable, marks=pytest.mark.repeats, id="torch"), OLD_TORCH]
)

BEGIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group(BACKEND)
rank, x = dist.get_rank(), torch.ones(250)
def pause():
    print("paused", flush=True)
    sys.stdin.readline()
"""


class Ranks:
    """Two ranks of a program, without a launcher."""

    def __init__(self, directory: Path, python: str, backend: str, program: str) -> None:
        script = directory / "program.py"
        script.write_text(BEGIN.replace("BACKEND", repr(backend)) + program)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.processes: list[subprocess.Popen[str]] = []
        self.ledgers: list[mmap.mmap] = []
        for rank in range(2):
            fd, mapping = ledger_file.offer({})
            assert fd is not None
            assert mapping is not None
            self.ledgers.append(mapping)
            env = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
                variables.LEDGER_FD: fd, variables.REPORT_FD: os.open(os.devnull, os.O_WRONLY),
                variables.JOB_ID: "test",
            }  # fmt: skip
            inherited = int(env[variables.LEDGER_FD]), int(env[variables.REPORT_FD])
            self.processes.append(
                subprocess.Popen(
                    [python, RUN_PROGRAM, script],
                    env=clean_environment(**{name: str(value) for name, value in env.items()}),
                    pass_fds=inherited,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for descriptor in inherited:
                os.close(descriptor)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=TIMEOUT)

    def paused(self, *ranks: int) -> None:
        """Wait until these ranks pause."""
        for rank in ranks:
            out = self.processes[rank].stdout
            assert out
            assert "paused\n" in iter(out.readline, "")

    def say_go_on(self, *ranks: int) -> None:
        """Continue these ranks, or all."""
        for process in [self.processes[rank] for rank in ranks] or self.processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()

    def go_on(self) -> None:
        """Continue both ranks, and wait for their end."""
        self.say_go_on()
        for process in self.processes:
            process.communicate(timeout=TIMEOUT)
        assert [process.returncode for process in self.processes] == [0, 0]

    def progress(self, rank: int) -> ledger.Progress:
        return ledger.progress(self.ledgers[rank]) or ledger.NONE

    def group(self, rank: int, name: str = "0") -> ledger.Group | None:
        return next((each for each in ledger.groups(self.ledgers[rank]) if each.name == name), None)

    def operations(self, rank: int) -> list[ledger.Operation]:
        group = self.group(rank)
        return list(group.operations) if group else []


def until(found: Callable[[], Any]) -> Any:
    """Wait for a true result of ``found``, and return it."""
    limit = time.monotonic() + TIMEOUT
    while not (result := found()):
        assert time.monotonic() < limit
        time.sleep(0.01)
    return result


@pytest.mark.parametrize(
    ("python", "backend"), [(sys.executable, "ccl"), pytest.param(*OLD_TORCH.values, "gloo", marks=no_intel)]
)
def test_a_killed_rank_leaves_its_last_operations(tmp_path: Path, python: str, backend: str) -> None:
    program = "for _ in range(6): dist.all_reduce(x)\nif rank == 1: pause()\ndist.all_reduce(x)\n"
    with Ranks(tmp_path, python, backend, program) as ranks:
        ranks.paused(1)

        def hangs() -> bool:
            last = ranks.operations(0)[-1:]
            complete = last and (
                last[0].waits_for == "1" if backend == "ccl" else len(ranks.operations(0)) == 7
            )
            return bool(complete and last[0].state == ledger.STARTED)

        until(hangs)
        ranks.processes[0].send_signal(signal.SIGKILL)
        ranks.processes[0].wait(TIMEOUT)
        *before, last = ranks.operations(0)
        assert [each.state for each in before] == [ledger.COMPLETED] * 6
        assert {(each.kind, each.type, each.bytes, each.peer) for each in (*before, last)} == {
            ("all_reduce", "float32", 1000, -1)
        }
        assert last.sequence == before[-1].sequence + 1
        assert before[-1].enqueued <= before[-1].completed <= time.monotonic_ns()
        assert last.completed == 0 < before[-1].enqueued <= last.enqueued < time.monotonic_ns()
        group = ranks.group(0)
        assert group
        assert (group.backend, group.size, group.rank, group.count) == (backend, 2, 0, 7)
        assert ranks.progress(0).collectives == 6


@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_messages_have_their_peers(tmp_path: Path, backend: str) -> None:
    program = (
        "if rank == 0: dist.send(x, 1)\nelse: dist.recv(x, 0)\n"
        "for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank),"
        " dist.P2POp(dist.irecv, torch.ones(250), 1 - rank)]): work.wait()\n"
        "if rank == 1: pause()\nelse: dist.recv(x, 1)\n"
    )
    with Ranks(tmp_path, sys.executable, backend, program) as ranks:
        ranks.paused(1)
        sent = until(lambda: len(ranks.operations(0)) == 4 and ranks.operations(0))
        assert [each.kind for each in sent] == ["send", "send", "recv", "recv"]
        assert {(each.peer, each.type, each.bytes) for each in sent} == {(1, "float32", 1000)}
        assert [each.state for each in sent] == [ledger.COMPLETED] * 3 + [ledger.STARTED]
        assert ranks.progress(0).collectives == 3
        received = until(lambda: len(ranks.operations(1)) == 3 and ranks.operations(1))
        assert [(each.kind, each.peer) for each in received] == [("recv", 0), ("send", 0), ("recv", 0)]


@each_torch
def test_barriers_of_gloo_are_recorded(tmp_path: Path, python: str) -> None:
    """``monitored_barrier`` isn't in torch's recorder, but takes the number of a collective."""
    program = (
        "dist.barrier()\ndist.send(x, 1) if rank == 0 else dist.recv(x, 0)\n"
        "dist.monitored_barrier()\ndist.all_reduce(x)\n"
        "if rank == 1:\n    pause()\n    dist.barrier()\n    pause()\n"
        "else: dist.barrier()\n"
        "dist.monitored_barrier()\nif rank == 0: pause()\n"
    )
    with Ranks(tmp_path, python, "gloo", program) as ranks:
        ranks.paused(1)
        in_barrier = until(lambda: len(ranks.operations(0)) == 5 and ranks.operations(0))
        assert in_barrier.pop(1).kind == "send"
        assert [(each.kind, each.state) for each in in_barrier] == [
            ("barrier", ledger.COMPLETED),
            ("monitored_barrier", ledger.COMPLETED),
            ("all_reduce", ledger.COMPLETED),
            ("barrier", ledger.STARTED),
        ]
        assert [each.sequence for each in in_barrier] == [0, 1, 3, 4]
        ranks.say_go_on(1)
        ranks.paused(1)
        last = until(lambda: len(ranks.operations(0)) == 6 and ranks.operations(0))[-1]
        assert (last.kind, last.sequence, last.state) == ("monitored_barrier", 5, ledger.STARTED)
        ranks.go_on()


BOTH = """
other, calls = dist.new_group(backend="gloo"), 300
import threading
def use(group):
    for _ in range(calls): dist.all_reduce(torch.ones(10), group=group)
thread = threading.Thread(target=use, args=(other,))
thread.start()
use(None)
thread.join()
pause()
"""


def test_collectives_of_two_backends_are_all_counted(tmp_path: Path) -> None:
    with Ranks(tmp_path, sys.executable, "ccl", BOTH) as ranks:
        ranks.paused(0, 1)
        own, others = (group for group in ledger.groups(ranks.ledgers[0]))
        assert (own.backend, others.backend) == ("ccl", "gloo")
        until(lambda: ranks.progress(0).collectives == own.count + 300)
        ranks.go_on()


@pytest.mark.repeats
@each_backend
def test_the_oldest_of_many_hanging_operations_is_kept(tmp_path: Path, backend: str) -> None:
    program = (
        "dist.all_reduce(x)\nif rank == 1: pause()\n"
        "works = [dist.all_reduce(torch.ones(10 + n), async_op=True) for n in range(40)]\n"
        "if rank == 0: pause()\nfor work in works: work.wait()\ndist.barrier()\n"
    )
    with Ranks(tmp_path, sys.executable, backend, program) as ranks:
        ranks.paused(0, 1)
        under_way = until(
            lambda: (
                [each for each in ranks.operations(0) if each.state == ledger.STARTED][15:]
                and ranks.operations(0)
            )
        )
        assert [each.bytes for each in under_way] in (
            [4 * (10 + n) for n in range(16)],
            [1000, *(4 * (10 + n) for n in range(15))],
        )
        ranks.go_on()
        assert ranks.progress(1).collectives >= 41 or backend == "gloo"


@pytest.mark.repeats
@each_torch
def test_a_group_that_cpulaunch_makes_has_a_description(tmp_path: Path, python: str) -> None:
    """A box names the group if only some ranks call ``save_if_due``."""
    program = (
        "import cpulaunch\nmodel = torch.nn.Linear(2, 2)\n"
        f"checkpoint = cpulaunch.Checkpoint({str(tmp_path / 'ckpt')!r}, model=model)\ncheckpoint.resume()\n"
        "if rank == 0: checkpoint.save_if_due()\npause()\nif rank == 1: checkpoint.save_if_due()\n"
        "checkpoint.wait()\n"
    )
    with Ranks(tmp_path, python, "gloo", program) as ranks:
        ranks.paused(0, 1)
        until(
            lambda: any(
                each.name.endswith(" (cpulaunch.Checkpoint)") for each in ledger.groups(ranks.ledgers[0])
            )
        )
        ranks.go_on()


@each_torch
def test_operations_of_a_group_destroyed_at_once_count(tmp_path: Path, python: str) -> None:
    """The group is destroyed before the thread that copies gloo's groups has looked once."""
    program = "for _ in range(3): dist.all_reduce(x)\ndist.destroy_process_group()\npause()\n"
    with Ranks(tmp_path, python, "gloo", program) as ranks:
        ranks.paused(0, 1)
        assert [ranks.progress(rank).collectives for rank in range(2)] == [3, 3]
        ranks.go_on()


def test_the_last_collective_of_a_destroyed_group_is_kept(tmp_path: Path) -> None:
    """Collectives of an earlier group with the same name don't count, and neither do messages."""
    program = (
        "pair = dist.new_group([0, 1])\ndist.barrier(pair)\n"
        "for _ in range(3): dist.all_reduce(x)\n"
        "dist.send(x, 1) if rank == 0 else dist.recv(x, 0)\ndist.destroy_process_group()\n"
        "dist.init_process_group('ccl')\ndist.broadcast(x, 0)\n"
    )
    with Ranks(tmp_path, sys.executable, "ccl", program) as ranks:
        ranks.go_on()
        for kept in ranks.ledgers:
            calls = {each["name"]: each["operations"] for each in ledger_file.last_calls(kept)}
            kinds = {name: [(op["kind"], op["sequence"]) for op in those] for name, those in calls.items()}
            assert kinds == {"0": [("broadcast", 0)], "1": [("barrier", 0)]}


@pytest.mark.repeats
@each_backend
def test_groups_share_the_ledgers_space(tmp_path: Path, backend: str) -> None:
    program = (
        "for _ in range(100):\n"
        "    group = dist.new_group([0, 1])\n    dist.all_reduce(x, group=group)\n    dist.destroy_process_group(group)\n"
        "dist.all_reduce(x)\npause()\n"
        "kept = [dist.new_group([0, 1]) for _ in range(40)]\n"
        "for group in kept: dist.all_reduce(x, group=group)\n"
        "dist.all_reduce(x)\nprint(end='', flush=True)\npause()\n"
    )
    with Ranks(tmp_path, sys.executable, backend, program) as ranks:
        ranks.paused(0)
        until(
            lambda: [group.name for group in ledger.groups(ranks.ledgers[0])] == ["0"] and ranks.operations(0)
        )
        ranks.say_go_on()
        ranks.paused(0)
        until(lambda: len(ledger.groups(ranks.ledgers[0])) == ledger.GROUPS and len(ranks.operations(0)) == 2)
        ranks.go_on()


TRAINS = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
for _ in range(5): step()
pid = os.fork()
if pid == 0:
    for _ in range(5): optimizer.step()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
pause()
"""


@pytest.mark.parametrize("backend", ["ccl", repeat("gloo")])
def test_steps_and_collectives_of_a_plain_script_are_counted(tmp_path: Path, backend: str) -> None:
    """A forked process is not the rank, and counts nothing."""
    with Ranks(tmp_path, sys.executable, backend, TRAINS) as ranks:
        ranks.paused(0, 1)
        progress = until(lambda: ranks.progress(0).collectives >= 5 and ranks.progress(0))
        assert (progress.steps, progress.expects_steps) == (5, True)
        assert 0 < progress.longest_gap < progress.progressed_at <= time.monotonic_ns()
        ranks.go_on()


FORKS = """
pid = os.fork()
if pid == 0:
    from cpulaunch.runtime.observe import ledger
    dist.GroupMember.WORLD = None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os._exit(len(ledger.mirrors))
assert os.waitpid(pid, 0)[1] == 0
pause()
"""


def test_groups_of_a_forked_process_are_not_in_the_ranks_ledger(tmp_path: Path) -> None:
    """The rank doesn't wait for collectives among its workers."""
    with Ranks(tmp_path, sys.executable, "ccl", FORKS) as ranks:
        ranks.paused(0, 1)
        assert len(ledger.groups(ranks.ledgers[0])) == 1
        ranks.go_on()


@pytest.mark.repeats
def test_compiled_steps_are_counted(tmp_path: Path) -> None:
    program = (
        "p = torch.nn.Parameter(torch.ones(3))\np.grad = torch.ones(3)\n"
        "optimizer = torch.optim.SGD([p], lr=0.1)\n"
        "step = torch.compile(optimizer.step, backend='eager')\n"
        "for _ in range(3): step()\n"
        "pause()\n"
    )
    with Ranks(tmp_path, sys.executable, "gloo", program) as ranks:
        ranks.paused(0, 1)
        assert ranks.progress(0).steps == 3
        ranks.go_on()


WAITED = """
import time
dist.barrier()
if rank == 1: time.sleep(0.5)
dist.all_reduce(x)
pause()
"""


def test_the_time_that_a_rank_waits_is_counted(tmp_path: Path) -> None:
    with Ranks(tmp_path, sys.executable, "ccl", WAITED) as ranks:
        ranks.paused(0, 1)
        assert ranks.progress(0).waiting > 4e8 > ranks.progress(1).waiting
