"""Waiting ranks' requests to the store, how ranks watch each other's processes, and forked processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks, run_script
from support.marks import repeat

from cpulaunch.ccl.create import store_interval

pytestmark = pytest.mark.slow


def test_the_rate_of_requests_to_the_store_is_bounded() -> None:
    assert store_interval(2) == store_interval(16) == 0.2
    assert [ranks / store_interval(ranks) for ranks in (64, 1024, 8192)] == [100, 100, 100]


def test_a_waiting_rank_of_a_large_group_rarely_asks_the_store(two: Ranks) -> None:
    """It sends one request in a large group, and would send 15 in a small group."""
    _, requests = two.call("requests_of_a_wait", 1024, 4.0)
    assert requests <= 4


def test_groups_share_their_pidfds(two: Ranks) -> None:
    assert two.call("watched_processes", 5) == [1, 1]


# Forbids only the system call pidfd_open (434), by seccomp(2), as containers of older Docker do.
UNWATCHED = """
import ctypes, os, struct
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 434), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
program = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(instructions)))
prctl, NO_NEW_PRIVS, SECCOMP, FILTER = ctypes.CDLL(None).prctl, 38, 22, 2
assert prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and prctl(SECCOMP, FILTER, program) == 0
import torch, torch.distributed as dist
dist.init_process_group("ccl")
for _ in range(3):
    dist.all_reduce(torch.ones(1), group=dist.new_group())
dist.barrier()
"""


def test_ranks_that_cannot_watch_each_other_warn_once(built: object) -> None:
    for rank in run_script(2, UNWATCHED):
        assert rank.returncode == 0, rank.stderr
        assert (
            rank.stderr.count("can't watch the processes of others on its host (Operation not permitted)")
            == 1
        )


FORKED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("ccl")
x = torch.ones(100_000)
work = dist.all_reduce(x, async_op=True) if dist.get_rank() == 0 else None  # in flight in rank 0
child = os.fork()
if child == 0:
    {child}
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
(work or dist.all_reduce(x, async_op=True)).wait()
dist.all_reduce(x)
print(status, x.sum().item())
"""


@pytest.mark.parametrize(
    ("child", "code", "transport"),
    [
        repeat("sys.exit(4)", 4, "auto"),
        repeat("dist.destroy_process_group(); sys.exit(5)", 5, "auto"),
        ("dist.all_reduce(x)", 1, "auto"),
        repeat("dist.all_reduce(x)", 1, "oneccl"),
    ],
)
def test_a_forked_child_does_no_harm(child: str, code: int, transport: str, built: object) -> None:
    script = FORKED.format(child=child)
    for rank in run_script(2, script, CPULAUNCH_RANK_CCL_TRANSPORT=transport):
        assert (rank.returncode, rank.stdout) == (0, f"{code} {400_000.0}\n"), rank.stderr
        assert ("a forked process takes no part in collectives" in rank.stderr) == (code == 1)


LATE = """
import os, select, time, torch, torch.distributed as dist
from cpulaunch.ccl import meeting
if {apart}:
    meeting._host = lambda: "host " + os.environ["RANK"]
dist.init_process_group("ccl")
others = [None] * 2
dist.all_gather_object(others, os.getpid())
if dist.get_rank() == 1:
    first = os.pidfd_open(others[0])
dist.barrier()
if dist.get_rank() == 1:
    assert select.select([first], [], [], 30)[0]
    time.sleep({seconds})
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("apart", "seconds", "transport"),  # heartbeats are written once a second, and nothing shows when
    [repeat(False, 0, "auto"), repeat(True, 2.5, "oneccl"), repeat(False, 0, "oneccl"), (True, 2.5, "auto")],
)
def test_a_rank_that_outlives_the_store_prints_nothing(
    apart: bool, seconds: float, transport: str, built: object
) -> None:
    script = LATE.format(apart=apart, seconds=seconds)
    for rank in run_script(2, script, CPULAUNCH_RANK_CCL_TRANSPORT=transport):
        assert (rank.returncode, rank.stderr) == (0, "")


STOPPED = """
import os, signal, threading, time, torch, torch.distributed as dist
from cpulaunch.ccl import create, meeting
os.environ["CPULAUNCH_HEARTBEAT_TIMEOUT"] = "5"
continued = []
signal.signal(signal.SIGCONT, lambda *_: continued.append(True))
if {apart}:
    meeting._host = lambda: "host " + os.environ["RANK"]
dist.init_process_group("ccl")
pids = [None] * dist.get_world_size()
dist.all_gather_object(pids, os.getpid())
x = torch.ones(1000)
dist.all_reduce(x)

def later(seconds, *what):
    threading.Timer(seconds, os.kill, what).start()

if dist.get_rank() == 1 - {stopped}:
    if {apart}:  # the first heartbeat says how to ask for it
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        store.wait([f"cpulaunch-ccl/heartbeat/host {stopped}/{{pids[{stopped}]}}"])
    {stop}
while dist.get_rank() != 1 - {stopped} and not continued:
    time.sleep(0.05)
dist.all_reduce(x)
print(x[0].item())
"""
SUSPENSION = 9
"""Seconds: the timeout, the grace period after it, and two more."""


@pytest.mark.parametrize(
    ("stopped", "apart", "transport"),
    [
        (0, True, "auto"),
        repeat(1, False, "auto"),
        repeat(1, True, "oneccl"),
    ],
)
def test_a_rank_that_is_stopped_for_long_is_not_lost(
    stopped: int, apart: bool, transport: str, built: object
) -> None:
    """Rank 0 has the store.  The other rank writes heartbeats to the store if it is the first on its host."""
    pid = f"pids[{stopped}]"
    stop = f"os.kill({pid}, signal.SIGSTOP); later({SUSPENSION}, {pid}, signal.SIGCONT)"
    script = STOPPED.format(apart=apart, stopped=stopped, stop=stop)
    for rank in run_script(2, script, CPULAUNCH_RANK_CCL_TRANSPORT=transport):
        assert (rank.returncode, rank.stdout, rank.stderr) == (0, "4.0\n", "")


def test_a_killed_peer_is_noticed_while_the_store_is_stopped(built: object) -> None:
    stop = "os.kill(pids[0], signal.SIGSTOP); later(2, pids[2], 9); later(6, pids[0], 9)"
    script = STOPPED.format(apart=False, stopped=0, stop=stop)
    _, survivor, _ = run_script(3, script)
    assert "rank 2 has ended" in survivor.stderr


RELEASED = """
import os, torch, torch.distributed as dist
dist.init_process_group("ccl")
dist.group.WORLD._get_backend(torch.device("cpu")).monitored_barrier()
if dist.get_rank() == 0:
    os._exit(0)  # the store ends, too
dist.destroy_process_group()
"""


def test_rank_0_may_end_right_after_a_monitored_barrier(built: object) -> None:
    for rank in run_script(3, RELEASED):
        assert (rank.returncode, rank.stderr) == (0, "")


RESTARTED = """
import os, select, time, torch, torch.distributed as dist
dist.init_process_group("ccl")
number, pids = dist.get_rank(), [None] * 2
dist.all_gather_object(pids, os.getpid())
other = os.pidfd_open(pids[1 - number])
old = dist.distributed_c10d._get_default_store() if number == 1 else None
dist.barrier()
dist.destroy_process_group()
if number == 0:
    os.mkdir("{gone}")
while not os.path.exists("{gone}"):
    time.sleep(0.01)
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # the new connection comes behind the old one
dist.init_process_group("ccl")
if number == 0:
    assert not select.select([other], [], [], 4)[0]  # for longer than a suspicion lasts
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def test_a_connection_to_an_earlier_store_on_the_port_is_harmless(built: object, tmp_path: Path) -> None:
    for rank in run_script(2, RESTARTED.format(gone=tmp_path / "gone")):
        assert rank.returncode == 0, rank.stderr
