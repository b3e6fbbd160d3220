"""The resource use of real processes, as the kernel reports it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import PlayedLauncher, placement
from support.command import TIMEOUT, bounded
from support.namespaces import until

from cpulaunch import messages
from cpulaunch.agent.observe.counters import Counters, events_of_cpu
from cpulaunch.agent.observe.processes import throttling
from cpulaunch.agent.observe.usage import Usage, process_row
from cpulaunch.discovery.host.far_memory import NODES, far_nodes, far_share
from cpulaunch.model.cores import CoreSet

SOFTWARE = {"nanoseconds": (1, 1), "page_faults": (1, 2)}
"""PERF_COUNT_SW_TASK_CLOCK and _PAGE_FAULTS, which all machines have."""

PAGES = 2000

# Waits for a line, and touches PAGES pages in a new thread, then in a child process.
TOUCHES = f"""
import mmap, os, threading
def touch():
    memory = mmap.mmap(-1, {PAGES} * 4096)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, len(memory), 4096):
        memory[at] = 1
    kept.append(memory)
kept = []
print("ready", flush=True)
input()
thread = threading.Thread(target=touch)
thread.start()
thread.join()
if not (child := os.fork()):
    touch()
    os._exit(0)
os.waitpid(child, 0)
print("done", flush=True)
input()
"""


def counters(pid: int) -> Counters:
    if not Counters(os.getpid(), SOFTWARE).read():
        pytest.skip("this machine forbids perf_event_open")
    return Counters(pid, SOFTWARE)


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", TOUCHES]
    with bounded(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)) as made:
        yield made


def test_the_counters_include_threads_but_not_child_processes(program: subprocess.Popen[str]) -> None:
    assert program.stdin
    assert program.stdout
    assert program.stdout.readline() == "ready\n"
    counted = counters(program.pid)
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.stdout.readline() == "done\n"
    found = counted.read()
    assert PAGES <= found["page_faults"] < 2 * PAGES
    assert found["nanoseconds"] > 0
    program.communicate("\n", timeout=TIMEOUT)
    assert counted.read()["page_faults"] >= found["page_faults"]  # the counters outlive the program
    counted.close()
    assert counted.read() == {}


def test_counters_that_the_kernel_refuses_are_left_out() -> None:
    assert Counters(os.getpid(), {"nothing": (1, 12345)}).read() == {}
    assert Counters(2**22 + 1, SOFTWARE).read() == {}  # there is no such process


@pytest.mark.parametrize(
    ("vendor", "flags", "asked"),
    [
        ("GenuineIntel", "fpu amx_tile", {"cycles", "instructions", "amx_busy"}),
        ("GenuineIntel", "fpu avx512f", {"cycles", "instructions"}),
        ("AuthenticAMD", "fpu amx_tile", {"cycles", "instructions"}),
    ],
)
def test_amx_is_counted_if_its_event_is_known(vendor: str, flags: str, asked: set[str]) -> None:
    cpuinfo = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
    assert events_of_cpu(cpuinfo).keys() == asked


def test_far_memory_is_the_share_on_the_given_nodes() -> None:
    """All memory counts as far if all nodes are given, and none if only a missing node is given."""
    memory = mmap.mmap(-1, 64 << 20)
    memory.write(b"x" * len(memory))
    nodes = frozenset(CoreSet.parse(Path(f"{NODES}has_memory").read_text().strip()))
    if (all_of_it := far_share(os.getpid(), nodes)) is None:
        pytest.skip("move_pages is forbidden here")
    assert all_of_it == 1
    assert far_share(os.getpid(), frozenset({1000})) == 0
    assert far_share(2**22 + 1, nodes) is None


TWO_SOCKETS = {f"{NODES}has_memory": "0-2\n", f"{NODES}node0/cpulist": "0-3\n", f"{NODES}node1/cpulist": "4-7\n",
               f"{NODES}node2/cpulist": "\n"}  # fmt: skip


def test_far_nodes_are_the_nodes_without_a_core_of_the_rank() -> None:
    assert far_nodes(CoreSet.parse("0-1"), TWO_SOCKETS.get) == {1, 2}
    assert far_nodes(CoreSet.parse("3-4"), TWO_SOCKETS.get) == {2}
    assert far_nodes(CoreSet.parse("0-1"), {f"{NODES}has_memory": "0\n"}.get) == frozenset()
    assert far_nodes(CoreSet.parse("0-1"), {}.get) == frozenset()


def test_a_process_row_has_the_kernels_figures() -> None:
    row = process_row(os.getpid())
    assert 1 << 20 < row["rss"] < 1 << 34
    assert 0 < row["cpu_seconds"] <= time.process_time() + 0.1
    assert process_row(2**22 + 1) == {}


def test_context_switches_of_ended_threads_still_count() -> None:
    usage = Usage(os.getpid(), CoreSet(os.sched_getaffinity(0)), time.monotonic())

    def wait_often() -> None:
        for _ in range(500):
            time.sleep(0)
            time.sleep(1e-6)
        done.wait(TIMEOUT)

    done = threading.Event()
    thread = threading.Thread(target=wait_often)
    thread.start()
    first = usage.row(time.monotonic())["voluntary_switches"]
    until(
        lambda: usage.row(time.monotonic())["voluntary_switches"] >= first + 500, "the thread to have waited"
    )
    before = usage.row(time.monotonic())
    done.set()
    thread.join()
    after = usage.row(time.monotonic())
    assert after["voluntary_switches"] >= before["voluntary_switches"]
    assert after["switches"] >= before["switches"]


def _held_back(pid: int) -> float:
    found = throttling(pid)
    return found.seconds if found else 0.0


def test_the_time_that_a_throttled_program_lost_is_reported(cpu_group: Path) -> None:
    """The quota is a twentieth of a CPU, and the program could use a whole CPU."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with bounded(subprocess.Popen(command, stdout=subprocess.PIPE)) as program:
        assert program.stdout
        program.stdout.readline()
        (cpu_group / "cgroup.procs").write_text(str(program.pid))
        usage = Usage(program.pid, CoreSet(os.sched_getaffinity(0)), before := time.monotonic())
        first = usage.row(before)["throttled_seconds"]
        until(lambda: _held_back(program.pid) > first + 1, "the group to be held back for a second")
        assert usage.row(time.monotonic())["throttled"] > 0.5
        program.kill()


COMPUTES = """
import time
end = time.monotonic() + 7
while time.monotonic() < end: pass
"""


@pytest.mark.slow
def test_rows_have_the_counters_of_this_machine(tmp_path: Path) -> None:
    """A machine may have no hardware counters."""
    with PlayedLauncher(placement(tmp_path), COMPUTES) as launcher:
        launcher.welcome()
        row = launcher.next(messages.Steps).process
        assert row["cpu_seconds"] > 0.1
        there = Counters(os.getpid()).read().keys()
        assert row.keys() & {"cycles", "instructions", "amx_busy"} == there
        assert launcher.next(messages.Exit).code == 0
