"""A report's sentences about a rank: its line, its children, its threads, and why it has no stack."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.seen import LOAD, MAIN, TORCH, Frame, explained, group, operation, others, process, seen, thread

from cpulaunch.supervise.control.observer_messages import RankStacks
from cpulaunch.supervise.stalls.stacks import place_lines


def test_children_of_a_program_without_python_are_shown() -> None:
    shell = process(command="sh -c", stacks="", lacking="it is not a Python program", python=False)
    child = process(
        pid=7, command="./solver -n 4", stacks="", lacking="it is not a Python program", python=False
    )
    found = explained(seen(0, [], shell, child))
    assert found.lines[-1] == "  its process 7: ./solver -n 4; sleeping"


def test_the_children_of_the_missing_rank_are_shown() -> None:
    loader = ("_next_data", "/venv/lib/python3.12/site-packages/torch/utils/data/dataloader.py", 9)
    torchs = ("_worker_loop", "/venv/lib/python3.12/site-packages/torch/utils/data/_utils/worker.py", 275)
    worker = process(("__getitem__", "/home/me/data.py", 30), torchs, MAIN, pid=77)
    idle = process(("get", "/usr/lib/python3.12/multiprocessing/queues.py", 113), torchs, MAIN, pid=78)
    late = seen(1, [group(1, operation(6, done=93))], process(loader, MAIN), worker, idle)
    assert explained(*others(1), late).lines[1:] == (
        "rank 1 on node1 finished #6 93 s ago and waits for input at train.py:91 main",
        "  its process 77: at data.py:30 __getitem__",
    )


def test_other_programs_that_a_rank_has_started_are_named() -> None:
    """The rank may wait for one of these programs."""
    fetch = process(
        pid=7, command="curl https://data", stacks="", lacking="it is not a Python program", python=False
    )
    found = explained(*others(1), seen(1, [group(1, operation(6, done=93))], process(LOAD, MAIN), fetch))
    assert found.lines[2] == "  its process 7: curl https://data; sleeping"


def test_the_line_of_a_thread_is_shown_while_it_is_in_torch() -> None:
    main = thread(("join", "/usr/lib/python3.12/threading.py", 9), MAIN) | {"id": 4}
    exchange: Frame = ("exchange", "/home/me/train.py", 33)
    within = thread(TORCH, exchange, name="helper") | {"id": 5}
    idle = thread(("get", "/usr/lib/python3.12/queue.py", 9), exchange, name="helper") | {"id": 5}
    for threads, does, at in (
        ((main, within), "waits in", ", at train.py:33 exchange, in its thread helper"),
        ((main, idle), "has started", ", and is at train.py:91 main"),
        ((main,), "has started", ", and is at train.py:91 main"),
    ):
        waits = seen(0, [group(0, operation(7, thread=5), size=2)], process(threads=list(threads)))
        late = seen(1, [group(1, operation(6, done=93), size=2)], process(LOAD, MAIN))
        assert explained(waits, late).lines[0] == (
            f"rank 0 on node0 {does} all_reduce #7 of group 0, 25 MB float32{at}"
        )


BACKWARD_PASS: Frame = (
    "_engine_run_backward",
    "/venv/lib/python3.12/site-packages/torch/autograd/graph.py",
    9,
)
MATMUL: Frame = ("forward", "/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", 9)
FSDP: Frame = ("forward", "/venv/lib/python3.12/site-packages/torch/distributed/fsdp/api.py", 9)
SLEEPS = {"wchan": "hrtimer_nanosleep"}


@pytest.mark.parametrize(
    ("frames", "state", "waits"),
    [
        ([TORCH, MAIN], {}, True),
        ([("wait", "/usr/lib/python3.12/threading.py", 9), TORCH, MAIN], {}, True),
        ([BACKWARD_PASS, MAIN], {"state": "R"}, True),  # torch may wait in a loop
        ([LOAD, BACKWARD_PASS, MAIN], {"state": "R"}, False),
        ([MATMUL, FSDP, MAIN], {"state": "R"}, False),
        ([MAIN], {"wchan": "futex_do_wait"}, True),  # in the operation's `wait`
        ([MAIN], {"state": "R"}, False),
        ([MAIN], SLEEPS, False),
        ([("c10d::Work::wait", "libtorch_cpu.so", 0), MAIN], {"state": "R"}, True),
        ([("at::mm", "libtorch_cpu.so", 0), MAIN], {}, False),
        ([], {}, True),
    ],
)
def test_a_rank_with_a_started_collective_waits_only_if_it_can(
    frames: list[Frame], state: dict[str, str], waits: bool
) -> None:
    started = seen(0, [group(0, operation(7), size=2)], process(*frames, **state))
    found = explained(started, seen(1, [group(1, operation(6, done=93), size=2)], process(LOAD, MAIN)))
    assert found.lines[0].startswith(
        f"rank 0 on node0 {'waits in' if waits else 'has started'} all_reduce #7 "
    )
    assert (found.headline, found.ranks) == ("rank 1 on node1 has not called all_reduce #7", (1,))


def test_a_rank_that_has_only_started_a_collective_has_its_own_line() -> None:
    computes = seen(2, [group(2, operation(7))], process(MAIN, state="R"))
    late = seen(3, [group(3, operation(6, done=93))], process(LOAD, MAIN))
    assert explained(*others(2, 3), computes, late).lines[:2] == (
        "ranks 0-1 on node[0-1] wait in all_reduce #7 of group 0, 25 MB float32, at train.py:91 main",
        "rank 2 on node0 has started all_reduce #7 of group 0, 25 MB float32, and is at train.py:91 main",
    )


def test_a_rank_that_has_only_started_a_collective_does_not_wait() -> None:
    """Rank 1 waits for that rank in another group."""
    zero = seen(
        0, [group(0, size=2, name="1"), group(0, operation(5), size=2, name="2")], process(LOAD, **SLEEPS)
    )
    one = seen(1, [group(1, operation(3), size=2, name="1"), group(1, size=2, name="2")])
    found = explained(zero, one)
    assert (found.headline, found.ranks) == ("rank 0 on node0 has not called all_reduce #3", (0,))
    assert not found.certain


def test_frames_of_libraries_without_a_source_file_are_not_a_programs_place() -> None:
    sleeping: Frame = ("__GI___clock_nanosleep", "../sysdeps/unix/sysv/linux/clock_nanosleep.c", 78)
    solver = process(sleeping, ("wait_for_input", "solver.c", 12), stacks="gdb", python=False)
    assert explained(seen(0, [], solver)).headline == "rank 0 on node0 is at solver.c:12 wait_for_input"
    stripped = process(sleeping, stacks="gdb", python=False)
    assert explained(seen(0, [], stripped)).headline == "rank 0 on node0 is at clock_nanosleep"


SHUTDOWN: Frame = ("_shutdown", "/usr/lib/python3.12/threading.py", 1594)
WORK: Frame = ("work", "/home/me/train.py", 31)


def test_a_thread_that_outlives_the_script_is_named_with_its_line() -> None:
    threads = [thread(SHUTDOWN), thread(TORCH, name="idle"), thread(WORK, name="loader")]
    ranks = [replace(seen(rank, [], process(SHUTDOWN, threads=threads)), leaving=True) for rank in range(2)]
    found = explained(*ranks)
    assert found.headline == "all ranks have finished, but don't exit: threads have not ended"
    assert found.lines[0] == "rank 0 on node0 is at train.py:31 work, in its thread loader"
    shown = [RankStacks(each.rank, each.host, each.dump and each.dump.processes) for each in ranks]
    assert list(place_lines(shown)) == ["[0-1] on node[0-1]: work at train.py:31, in its thread loader"]
    alone = explained(ranks[0])
    assert alone.place
    assert (alone.place.file, alone.place.line) == (WORK[1], WORK[2])


def test_a_thread_that_outlives_the_script_in_a_function_of_c_is_named() -> None:
    run: Frame = ("Thread.run", SHUTDOWN[1], 1012)
    begin: Frame = ("Thread._bootstrap", SHUTDOWN[1], 1032)
    threads = [
        thread(SHUTDOWN),
        thread(TORCH, begin, name="idle"),
        thread(run, begin, name="Thread-1 (sleep)"),
    ]
    found = explained(replace(seen(0, [], process(SHUTDOWN, threads=threads)), leaving=True))
    assert found.headline == "rank 0 on node0 has finished, but doesn't exit: threads have not ended"
    assert (
        found.lines[0] == "rank 0 on node0 is at threading.py:1012 Thread.run, in its thread Thread-1 (sleep)"
    )


def test_the_reason_for_a_missing_stack_of_the_main_thread_is_shown() -> None:
    ends = process(wchan="futex_wait", threads=[], stacks="py-spy")
    found = explained(*[replace(seen(rank, [], ends), leaving=True) for rank in range(2)])
    assert found.lines[0] == (
        "rank 0 on node0 is sleeping in futex_wait of the kernel (no stack: its main thread runs no Python)"
    )


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((25_000_000, 25_000_004), ("25,000,000 bytes", "25,000,004 bytes")),
        ((25_000_000, 12_000_000), ("25 MB", "12 MB")),
        ((36, 0), ("36 bytes", "0 bytes")),
    ],
)
def test_sizes_that_would_look_equal_are_shown_in_full(sizes: tuple[int, int], told: tuple[str, str]) -> None:
    ranks = [
        seen(rank, [group(rank, operation(7, bytes=size), size=2)], process(TORCH, MAIN))
        for rank, size in enumerate(sizes)
    ]
    lines = explained(*ranks).lines
    assert [line.partition(" of group 0, ")[2].partition(" float32")[0] for line in lines] == [*told]
