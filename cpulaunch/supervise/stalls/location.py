"""Find where a rank's program is and what keeps it from running, for the report of a stall."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from cpulaunch.supervise.stalls.stacks import (
    BACKWARD,
    Frame,
    Process,
    Stack,
    main_stack,
    main_thread,
    special_states,
    stack,
    surviving_thread,
    threads_of,
    waits_for_file,
)

_DATA_LOADER = "torch/utils/data/dataloader.py"
_LOADS = ("_next_data", "_get_data", "_try_get_data")
"""Functions of torch's DataLoader that wait for its workers."""

_WORKER, _QUEUE = "torch/utils/data/_utils/worker.py", "multiprocessing/queues.py"
"""The file of a DataLoader's worker, and the file in which an idle worker waits."""

_IN_TORCH = re.compile(r"/torch/(distributed|nn/parallel|futures)/|/torch/_ops\.py$")
"""Files of torch whose functions wait in collectives."""

_OF_GROUPS = re.compile(r"c10d::|gloo::|Ccl")
"""Parts of the names of C++ functions that wait in collectives."""

_LOCKS = ("PyThread_acquire_lock", "_PyMutex_Lock", "pthread_mutex_lock", "lll_lock_wait", "lock_acquire")
"""Parts of the names of C functions that wait for a lock."""

MAX_COMMAND = 60
"""Maximum characters of a child's command to show."""

THROTTLED = 0.2
"""A CPU quota counts as the reason for a stall if it takes at least this share of the time."""


def place(process: Process, caller: int = 0) -> Frame | None:
    """Return the innermost frame of the user's code, or else the innermost Python frame.

    The frame is from the thread ``caller`` if that is still in torch, from a thread that the ended script
    waits for, or from the main thread.
    """
    thread = _thread(process, caller)
    return _place(stack(thread) if thread else main_stack(process))


def describe_place(process: Process, caller: int = 0) -> str:
    """Describe the place: ``train.py:88 train, in the backward pass``.

    Without a stack, describe the process's state and the kernel function in which it sleeps.
    """
    if (frame := place(process, caller)) is None:
        waits = f" in {process['wchan']} of the kernel" if process.get("wchan") else ""
        return f"{process.get('word') or 'an unknown place'}{waits}"
    thread = _thread(process, caller)
    frames = stack(thread) if thread else main_stack(process)
    backward = ", in the backward pass" if any(each.function == BACKWARD for each in frames) else ""
    other = f", in its thread {thread['name'] or caller}" if thread else ""
    return f"{describe_frame(frame)}{backward}{other}"


def _thread(process: Process, caller: int) -> Process | None:
    """Return the thread ``caller`` if it is in torch and isn't the main thread.

    If ``caller`` is 0, return the thread that the ended script waits for, if any.
    """
    if not caller:
        return surviving_thread(process)
    found = next((each for each in threads_of(process) if each["id"] == caller), None)
    if found is None or found["name"] == "MainThread":
        return None
    return found if any("/torch/" in frame.file for frame in stack(found)) else None


def may_wait(process: Process, caller: int = 0) -> bool:
    """Whether the thread ``caller`` of a collective, or the main thread, may be waiting in it.

    If the collective is asynchronous, the thread may be elsewhere.
    """
    main = main_thread(process)
    thread = next((each for each in threads_of(process) if caller and each["id"] == caller), main)
    frames = stack(thread) if thread else ()
    python = [frame for frame in frames if frame.is_python]
    if thread is None or thread.get("left_out") or not python:
        return True
    if any(_OF_GROUPS.search(frame.function) for frame in frames if not frame.is_python):
        return True
    caller_of_c = next((each for each in python if not each.is_standard and not each.is_ours), python[0])
    if _IN_TORCH.search(caller_of_c.file) or caller_of_c.function == BACKWARD:
        return True
    # In an operation's `wait`, which is C++, the thread sleeps, and its innermost frame is the user's.
    asleep = thread["idle"] is not False and not (thread is main and process.get("state") == "R")
    futex = thread is not main or "futex" in (process.get("wchan") or "futex")
    return frames[0] == caller_of_c and asleep and futex


def _place(frames: Stack) -> Frame | None:
    users = [frame for frame in frames if frame.is_users]
    python = [frame for frame in frames if frame.is_python and not frame.is_ours]
    native = [frame for frame in frames if not frame.is_libc]
    return next(iter(users or python or native or frames), None)


def describe_frame(frame: Frame) -> str:
    """Describe a frame: ``train.py:88 load_batch``."""
    if not frame.has_line:
        return frame.function
    return f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"


def runs(process: Process) -> bool:
    """Whether the main thread is known to compute, but not in a collective, where it may poll."""
    main = main_thread(process)
    if main is None or main["idle"] is not False:
        return False
    return not any("torch/distributed/" in frame.file for frame in stack(main))


def waits_for_input(process: Process) -> bool:
    return any(
        f.file.endswith(_DATA_LOADER) and f.function.rpartition(".")[2] in _LOADS for f in main_stack(process)
    )


def is_idle_worker(process: Process) -> bool:
    """Whether the process is a DataLoader's worker that has nothing to load."""
    files = [frame.file for frame in main_stack(process)]
    return any(a.endswith(_QUEUE) and b.endswith(_WORKER) for a, b in pairwise(files))


def is_deadlocked(process: Process) -> bool:
    """Whether several threads wait for locks, and no other thread can release one.  Needs frames of C."""
    threads = threads_of(process)
    waiting = [thread for thread in threads if _waits_for_lock(thread)]
    others = (thread for thread in threads if thread not in waiting)
    return len(waiting) > 1 and not any(each["idle"] is False or _runs_users_code(each) for each in others)


def describe_lock_waits(process: Process) -> list[str]:
    """Describe the threads that run the user's code, if one of them waits for a lock.  Needs frames of C."""
    threads = [thread for thread in threads_of(process) if _runs_users_code(thread)]
    waiting = [_waits_for_lock(thread) for thread in threads]
    if len(threads) < 2 or not any(waiting):
        return []
    return [
        f"its thread {thread['name'] or thread['id']} {'waits for a lock' if waits else 'is'} at "
        + describe_frame(frame)
        for thread, waits in zip(threads, waiting, strict=True)
        if (frame := _place(stack(thread)))
    ]


def _runs_users_code(thread: Process) -> bool:
    return any(frame.is_users for frame in stack(thread))


def _waits_for_lock(thread: Process) -> bool:
    """Whether a thread waits for a lock in the user's code, not in a library's queue or condition."""
    frames = [Frame(*frame) for frame in thread["frames"]]
    python = next((number for number, frame in enumerate(frames) if frame.is_python), len(frames))
    if python == len(frames) or not frames[python].is_users:
        return False
    return any(lock in frame.function for frame in frames[:python] for lock in _LOCKS)


def hold_reason(process: Process) -> str:
    """Say what keeps the process from running; empty if no reason is known."""
    quota = process.get("throttled") or {}
    stopped = process.get("state") == "T" or process.get("traced_by") or process.get("blocked")
    words = special_states(process)
    if prompts := any(frame.file.endswith("/pdb.py") for frame in main_stack(process)):
        words.append("at the prompt of pdb")
    throttled = quota.get("share", 0) >= THROTTLED
    return "; ".join(words) if stopped or waits_for_file(process) or prompts or throttled else ""


def describe_children(processes: Sequence[Process]) -> Iterator[tuple[int, str]]:
    """Yield the process ids and descriptions of the program's children.

    Children that run the same program are left out if they are idle workers, or if nothing is known about
    them.
    """
    for process in processes[1:]:
        frame, state = place(process), hold_reason(process)
        words = [state, f"at {describe_frame(frame)}" if frame else ""]
        if not frame:
            words.append(describe_place(process))
        if process.get("command") != processes[0].get("command"):
            words.insert(0, _command(process))
        elif processes[0].get("python", True) and not state and (not frame or is_idle_worker(process)):
            continue
        yield process["pid"], "; ".join(filter(None, words))


def _command(process: Process) -> str:
    command = str(process.get("command"))
    return command if len(command) <= MAX_COMMAND else f"{command[:MAX_COMMAND]}…"
