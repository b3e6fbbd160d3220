"""The stacks of many ranks as text."""

from __future__ import annotations

from typing import Any

import pytest
from support.seen import process as made

from cpulaunch.supervise.control.observer_messages import RankStacks
from cpulaunch.supervise.stalls.stacks import (
    Frame,
    missing_frames,
    place,
    place_lines,
    report,
    special_states,
)

TORCH = "/venv/lib/python3.11/site-packages/torch/distributed"
START = [
    ("_run_file", "/venv/lib/python3.11/site-packages/cpulaunch/agent/bootstrap.py", 164),
    ("main", "/src/cpulaunch/agent/bootstrap.py", 64),
]
ALL_REDUCE = [
    ("all_reduce", f"{TORCH}/distributed_c10d.py", 2810),
    ("wrapper", f"{TORCH}/c10d_logger.py", 81),
    ("train", "/home/me/train.py", 91),
    ("<module>", "/home/me/train.py", 120),
    *START,
]
LOAD = [("load_batch", "/home/me/train.py", 88), *ALL_REDUCE[2:]]


def thread(frames: list[Any], name: str = "MainThread") -> dict[str, Any]:
    return {"id": 1, "name": name, "gil": False, "idle": True, "frames": frames}


def process(*threads: Any, **different: Any) -> dict[str, Any]:
    return made(**{"threads": list(threads), "pid": 4711, "command": "python train.py", **different})


def seen(rank: int, *processes: Any, host: str = "") -> RankStacks:
    return RankStacks(rank, host or f"node{rank // 4}", processes)


def test_the_reason_why_a_program_wrote_its_own_stacks_is_shown() -> None:
    written = process(thread(ALL_REDUCE), stacks="faulthandler", lacking="py-spy was not found")
    line = "[0-1] py-spy was not found: stacks have no frames of C, and threads no names"
    ranks = [seen(0, written), seen(1, written), seen(2, process(thread(LOAD)))]
    assert list(missing_frames(ranks)) == [line]
    assert line in report(ranks).splitlines()
    assert not list(missing_frames(ranks[2:]))


def test_wrappers_of_cpulaunch_around_torchs_functions_are_left_out() -> None:
    wait = (
        "Communication._watch_waits.<locals>.wait",
        "/venv/cpulaunch/runtime/observe/communication.py",
        105,
    )
    text = report([seen(0, process(thread([wait, *ALL_REDUCE])))])
    assert "cpulaunch" not in text
    assert "all_reduce ← train.py:91" in text


def test_the_rank_of_the_c_frames_is_shown() -> None:
    native = thread([("poll", "/usr/lib/libc.so.6", 0), *ALL_REDUCE])
    text = report([seen(0, process(native)), seen(1, process(native, native_of=0))])
    assert (
        "[0-1] all_reduce ← train.py:91 (frames of C and C++ are those of rank 0)\n  pids 4711, 4711\n    poll"
        in text
    )


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        (ALL_REDUCE, "all_reduce ← train.py:91"),
        (LOAD, "load_batch at train.py:88"),
        (
            [
                ("select", "/usr/lib/python3.11/selectors.py", 415),
                ("wait", "/usr/lib/python3.11/multiprocessing/connection.py", 931),
                ("_try_get_data", "/v/site-packages/torch/utils/data/dataloader.py", 1275),
                ("__next__", "/v/site-packages/torch/utils/data/dataloader.py", 700),
                ("<module>", "/home/me/train.py", 5),
            ],
            "_try_get_data ← train.py:5",
        ),
        (
            [
                ("wait", "/usr/lib/python3.11/threading.py", 324),
                ("get", "/usr/lib/python3.11/queue.py", 171),
                ("next_item", "/home/me/queues.py", 7),
            ],
            "get ← queues.py:7",
        ),
        (
            [
                ("futex_wait", "/usr/lib/libc.so.6", 0),
                ("pthread_mutex_lock", "/usr/lib/libc.so.6", 0),
                ("f", "/home/me/t.py", 3),
            ],
            "pthread_mutex_lock ← t.py:3",
        ),
        ([("run", "/usr/lib/python3.11/threading.py", 982)], "run"),
        ([], "no frames"),
    ],
)
def test_a_place_in_a_few_words(frames: list[Any], words: str) -> None:
    assert place(tuple(Frame(*frame) for frame in frames)).startswith(words)


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({}, []),
        ({"state": "T", "stopped_by": "SIGTSTP"}, ["stopped (SIGTSTP)"]),
        ({"state": "t", "traced_by": 7, "tracer": "gdb"}, ["a debugger (pid 7, gdb) holds it"]),
        (
            {"blocked": [{"call": "read", "file": "/mnt/data", "wchan": "x"}] * 2},
            ["waits for a disk: read of /mnt/data"],
        ),
        (
            {"blocked": [{"call": None, "file": None, "wchan": "nfs_wait"}]},
            ["in uninterruptible sleep in the kernel: nfs_wait"],
        ),
        ({"throttled": {"share": 0.93}}, ["throttled 93 % by its cgroup"]),
        ({"throttled": {"share": 0.01}}, []),
        ({"swapped": 3250000}, ["3.1 GB swapped out"]),
        ({"call": "read", "file": "/tmp/fifo"}, ["waits in read of /tmp/fifo"]),
        ({"call": "read", "file": "pipe:[123]"}, []),
    ],
)
def test_states_are_described_in_words(different: dict[str, Any], words: list[str]) -> None:
    assert special_states(process(**different)) == words


def test_ranks_with_the_same_stack_are_shown_once() -> None:
    ranks = [seen(rank, process(thread(LOAD if rank == 3 else ALL_REDUCE))) for rank in range(16)]
    assert report(ranks) == (
        "[3] on node0: load_batch at train.py:88\n"
        "  pid 4711\n"
        "    load_batch  /home/me/train.py:88\n"
        "    train  /home/me/train.py:91\n"
        "    <module>  /home/me/train.py:120\n"
        "\n"
        "[0-2,4-15] all_reduce ← train.py:91\n"
        f"  pids {', '.join(['4711'] * 15)}\n"
        "    all_reduce  torch/distributed/distributed_c10d.py:2810\n"
        "    wrapper  torch/distributed/c10d_logger.py:81\n"
        "    train  /home/me/train.py:91\n"
        "    <module>  /home/me/train.py:120\n"
    )


def test_calls_of_ddp_are_shown_in_the_backward_pass() -> None:
    backward = [
        ("_engine_run_backward", "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", 879),
        ("backward", "/venv/lib/python3.11/site-packages/torch/_tensor.py", 630),
        *LOAD[1:],
    ]
    ranks = [seen(rank, process(thread(backward)), host="a") for rank in range(2)]
    assert list(place_lines(ranks)) == ["[0-1] backward ← train.py:91"]
    shown = list(place_lines(ranks, {0: "all_reduce"}))
    assert shown == ["[0] all_reduce in backward ← train.py:91", "[1] backward ← train.py:91"]


def test_ranks_without_a_stack_are_listed() -> None:
    worker = process(thread([("fetch", "/home/me/data.py", 7)]), pid=5000)
    ranks = [
        seen(
            0, process(thread(ALL_REDUCE), thread(LOAD[:1], "loader"), thread(LOAD[:1], "loader2")), host="a"
        ),
        seen(1, process(thread(ALL_REDUCE), state="T", stopped_by="SIGSTOP"), worker, host="a"),
        seen(
            2,
            process(stacks="", lacking="it is not a Python program", python=False, wchan="pipe_read"),
            host="a",
        ),
        RankStacks(3, "a", None, "it has not answered within 10 s"),
        RankStacks(4, "a", (), "its program has ended"),
        RankStacks(5, "a", None, left="exit 0"),
    ]
    text = report(ranks)
    assert "[3] no answer: it has not answered within 10 s\n" in text
    assert "[5] has left: exit 0\n" in text
    assert "[4] its program has ended\n" in text
    assert "[1] stopped (SIGSTOP)\n" in text
    assert (
        "[2] python train.py: sleeping, in pipe_read of the kernel; no stack: it is not a Python program\n"
        in text
    )
    assert "  [0] 2 threads (loader, …): load_batch at train.py:88\n      load_batch" in text
    assert "[1] child 5000: fetch at data.py:7\n" in text
