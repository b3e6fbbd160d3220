"""Programs that hang in different ways: ``train.py BACKEND CASE``.

The first rank of the second half causes the hang.
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from support.command import REPOSITORY
from support.jobs import box, outcome

Hang = Callable[..., subprocess.CompletedProcess[str]]
"""Runs a case of PROGRAM until it is reported and ended."""

PROGRAM = """
import ctypes, glob, os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader

backend, case = sys.argv[1:]
case == "unmet" or dist.init_process_group(backend)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
is_culprit = rank == size // 2
ones, more = torch.ones(1000), torch.ones(2000)

def step(tensor=ones):
    dist.all_reduce(tensor)

def steps(count):
    for _ in range(count):
        step()

def load_batch():
    time.sleep(600)

def late():
    steps(6)
    if is_culprit:
        load_batch()
    step()

def other_operation():
    steps(3)
    if is_culprit:
        dist.broadcast(ones, rank)
    else:
        step()
    step()

def other_size():
    steps(3)
    if is_culprit:
        dist.all_reduce(more)
    else:
        step(ones)
    step()

def crossed():
    first, second = dist.new_group(), dist.new_group()
    steps(3)
    groups = {"culprit": second, "other": first}
    if is_culprit:
        dist.all_reduce(ones, group=groups["culprit"])
    else:
        dist.all_reduce(ones, group=groups["other"])

class Items:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index > 3 and is_culprit:
            read_item()
        return index

def read_item():
    time.sleep(600)

def worker():
    for _ in DataLoader(Items(), num_workers=1):
        step()

def c_lock():
    steps(3)
    if is_culprit:
        hold_the_gil()
    step()

def hold_the_gil():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def dead_lock():
    steps(3)
    if is_culprit:
        one, two = threading.Lock(), threading.Lock()
        one.acquire()
        threading.Thread(target=other_thread, args=(one, two), daemon=True).start()
        while not two.locked():
            time.sleep(0.01)
        two.acquire()
    step()

def other_thread(one, two):
    two.acquire()
    one.acquire()

def disk():
    steps(3)
    if is_culprit:
        read_file()
    step()

def read_file():
    with open(os.environ["HUNG_FILE"], "rb") as file:
        file.read(1)

def throttled():
    steps(30)  # after fewer, a rank that computes a little may be on its way to the first step
    if is_culprit:
        with open(os.path.join(os.environ["CPU_GROUP"], "cgroup.procs"), "w") as group:
            group.write(str(os.getpid()))
        compute()
    step()

def compute():
    while True:
        pass

def goes_on():
    steps(3)
    if is_culprit:
        wait_for_the_report()
    step()

def wait_for_the_report():
    agent = os.getppid()
    os.kill(agent, signal.SIGSTOP)
    while not glob.glob("runs/*/stacks-1.txt") and os.getppid() == agent:
        time.sleep(0.05)
    os.kill(agent, signal.SIGCONT)
    print("on", flush=True)

def save():
    steps(3)
    if rank == 0:
        time.sleep(5)
    step()

def held():
    steps(3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 2:
        traced()
    elif rank == 3:
        debugged()
    step()

def traced():
    rank, (sleeps, enters) = os.getpid(), os.pipe()
    if os.fork() == 0 and os.read(sleeps, 1):
        ctypes.CDLL(None).ptrace(16, rank, 0, 0)  # PTRACE_ATTACH
    os.write(enters, b"1") and time.sleep(600)

def debugged():
    sys.stdin = os.fdopen(os.pipe()[0])
    breakpoint()

def download():
    while not glob.glob("runs/*/stacks-1.txt"):
        time.sleep(0.05)

def unmet():
    if is_culprit:
        download()
    dist.init_process_group(backend)
    step()

def roots():
    steps(3)
    dist.broadcast(ones, size - 1 - rank)

def in_backward(features, other):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(features, 100))
    for number in range(4):
        if number == 3 and is_culprit:
            other()
        else:
            model(torch.ones(1, features)).sum().backward()
    step()

def larger_than_a_bucket():
    in_backward(10, lambda: dist.all_reduce(more))

def stopped_for_a_while():
    os.environ["CPULAUNCH_HEARTBEAT_TIMEOUT"] = "5"
    group = dist.new_group()
    if rank == 0:
        os.symlink(str(os.getpid()), "pid")
    dist.all_reduce(ones, group=group)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        threading.Thread(target=go_on_later).start()
    dist.all_reduce(ones, group=group)
    print("the sum is", ones[0].item(), flush=True)

def go_on_later():
    download()
    time.sleep(6)
    os.kill(int(os.readlink("pid")), signal.SIGCONT)

def new_group():
    steps(3)
    if is_culprit:
        make_group()
    step()

def make_group():
    dist.new_group()

def finished():
    steps(3)
    if is_culprit:
        sys.exit()
    step()

def asynchronous():
    steps(3)
    if is_culprit:
        load_batch()
    work = dist.all_reduce(ones, async_op=True)
    compute()
    work.wait()

def other_type():
    steps(3)
    step(ones.int() if is_culprit else ones)

def hasty_group():
    from datetime import timedelta
    group = dist.new_group(timeout=timedelta(seconds=3))
    dist.all_reduce(ones, group=group)
    return group

def hasty():
    group = hasty_group()
    if is_culprit:
        load_batch()
    dist.all_reduce(more, group=group)


def pairs():
    from datetime import timedelta
    both = [dist.new_group([1, 2], timeout=timedelta(seconds=3)) for _ in "ab"]
    for group in both if rank else ():
        dist.all_reduce(ones, group=group)
    return both

def destroyed_pair():
    group, _ = pairs()
    if is_culprit:
        dist.destroy_process_group(group)
        load_batch()
    elif rank == 2:
        dist.all_reduce(more, group=group)
    step()

def done():
    steps(3)
    if is_culprit:
        load_batch()
    dist.broadcast(ones, 0)
    if rank == 0:
        sys.exit()  # the others destroy the group before

def in_two_threads():
    first, second = dist.new_group(), dist.new_group()
    steps(3)
    thread = threading.Thread(target=spread, args=(second,), name="spread")
    thread.start()
    if is_culprit:
        load_batch()
    dist.all_reduce(more, group=first)
    thread.join()

def spread(group):
    if is_culprit:
        load_batch()
    dist.broadcast(ones, 0, group)

globals()[case]()
dist.destroy_process_group()
"""


def line_of(text: str, after: str = "") -> int:
    """Return the number of the program's first line with ``text`` after a line with ``after``."""
    lines = PROGRAM.splitlines()
    start = next((number for number, line in enumerate(lines) if after in line), 0)
    return next(number + 1 for number, line in enumerate(lines) if number >= start and text in line)


PAGES = "".join((REPOSITORY / "docs" / name).read_text() for name in ("hangs.md", "hang-reports.md"))
"""The pages about jobs that hang."""


def shown_in_docs(text: str) -> bool:
    """Return whether the documentation shows the only box in ``text``; on a slow machine, no step may be made."""
    late = ", before the first step"
    (found,) = boxes(text.replace(late, ""))
    return found in boxes(PAGES.replace(late, ""))


def boxes(text: str) -> list[list[str]]:
    """Title and lines of the boxes in ``text``, without parts that differ between runs."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("╭"):
            found.append([_the_same(line.strip("╭╮─ "))])
        elif line.startswith("│"):
            found[-1].append(_the_same(line.strip("│ ")))
    return found


def _the_same(line: str) -> str:
    for varies, word in (
        (r"\b\d+ s\b", "N s"),
        (r"^ranks? [\d-]+ on (node\d) waits? for ranks? [\d-]+ on", r"ranks on \1 wait for those on"),
        (r"runs/[\w-]+/stacks-\d", "runs/JOB/stacks-N"),
        (r"(process|pid) \d+", r"\1 N"),
        (r"\bpython[\d.]+", "python"),
    ):
        line = re.sub(varies, word, line)
    return line


def stall(
    tmp_path: Path, done: subprocess.CompletedProcess[str], *, in_docs: bool = False
) -> tuple[str, list[str], dict]:
    """Title and lines of the last box, and its entry in outcome.json.

    The boxes before it, on a slow machine, say that the first step is late. Asserts that the documentation
    has the last box, if required.
    """
    assert done.returncode == 4, done.stderr
    result = outcome(tmp_path)
    *late, found = result["stalls"]
    assert result["kind"] == "stalled"
    assert all("before the first step" in each["advice"] for each in late), late
    last = done.stderr[done.stderr.rindex("╭") :]
    title, lines = box(last)
    assert not in_docs or shown_in_docs(last), done.stderr
    return title, lines, found
