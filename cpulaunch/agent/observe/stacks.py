"""Parse the stacks that py-spy, gdb and faulthandler print into the form of ``Dump.processes``.

A thread is a dict with ``id`` (None if unknown), ``name``, ``gil``, ``idle`` and ``frames``.  Each frame is
``[function, file, line]``, the innermost first.  ``left_out`` is the number of omitted frames.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

MAIN = "MainThread"
"""The name that ``threading`` gives to the main thread."""

MAX_NAME = 120
"""The largest length of a function's name in characters."""

MAX_FILE = 200
"""The largest length of a path in characters; the end of a longer path is kept."""

LIMITS = ((64, 64), (48, 32), (32, 16), (16, 8), (4, 4))
"""Limits of threads per process and frames per thread, in the order in which `fit` tries them."""

Frame = tuple[str, str, int]


_OURS = re.compile(r"/cpulaunch/(runtime|ccl)/")


def is_own(thread: dict[str, Any]) -> bool:
    """Whether cpulaunch started this thread in the program, such as the one that copies gloo's groups."""
    if thread["name"].startswith("cpulaunch-"):
        return True
    frames = [file for _, file, _ in thread["frames"] if not file.endswith("/threading.py")]
    return thread["name"] != MAIN and bool(frames) and bool(_OURS.search(frames[-1]))


def from_py_spy(text: bytes, pid: int) -> list[dict[str, Any]]:
    """Parse the output of ``py-spy dump --json`` for the process ``pid``.  Skip cpulaunch's own threads.

    Raises ValueError if the output has another form.
    """
    try:
        threads = [
            {
                "id": thread["os_thread_id"],
                "name": str(thread["thread_name"] or MAIN * (thread["os_thread_id"] == pid))[:MAX_NAME],
                "gil": bool(thread["owns_gil"]),
                "idle": not thread["active"],
                "frames": _without_repeated([_frame(frame) for frame in thread["frames"]]),
            }
            for thread in json.loads(text)
        ]
    except (KeyError, TypeError) as e:
        raise ValueError(f"unexpected output of py-spy: {e!r}") from None
    return [thread for thread in threads if not is_own(thread)]


def _frame(frame: dict[str, Any]) -> Frame:
    name, file = str(frame["name"]), str(frame["filename"] or frame["module"] or "")
    python = file.endswith(".py") or file.startswith("<")
    return name if python else short_name(name), file[-MAX_FILE:], int(frame["line"] or 0)


def _without_repeated(frames: Sequence[Frame]) -> list[Frame]:
    """Merge equal consecutive frames without a name (``?``) into one."""
    return [
        frame
        for number, frame in enumerate(frames)
        if frame[0] != "?" or number == 0 or frame != frames[number - 1]
    ]


def short_name(name: str) -> str:
    """The name of a C or C++ function without parameters and template arguments; ``?`` for an address."""
    if re.fullmatch(r"0x[0-9a-f]+", name):
        return "?"
    name = name.replace("(anonymous namespace)::", "").replace("{lambda", "lambda{")
    name = re.sub(r"operator(<=>|<<=?|>>=?|<=?|>=?|->\*?|\(\))", _spelled, name)
    kept, depth = [], 0
    for character in name:
        if character in "<({":
            depth += 1
        elif character in ">)}":
            depth -= 1
        elif depth <= 0:
            kept.append(character)
    words = "".join(kept).split(" const")[0].split("[")[0].strip()
    # For a template, the text begins with the return type.
    return (words.rpartition(" ")[2] or words or "?")[:MAX_NAME]


def _spelled(found: re.Match[str]) -> str:
    words = {"<": "less", ">": "greater", "=": "equal", "-": "minus", "*": "star", "(": "call", ")": ""}
    return "operator_" + "_".join(filter(None, (words[character] for character in found[1])))


_GDB_THREAD = re.compile(r'Thread \d+ \(.*?(?:LWP|process) (\d+)\)?(?: "(.*)")?')
_GDB_FRAME = re.compile(r"#\d+ +(?:0x[0-9a-f]+ in )?(.+?) \(.*?\)(?: at (.+):(\d+)| from (.+))?$")


def from_gdb(text: bytes, pid: int) -> list[dict[str, Any]]:
    """Parse the output of gdb's ``thread apply all backtrace``.  Raises ValueError if it has no threads."""
    threads: list[dict[str, Any]] = []
    for line in text.decode(errors="replace").splitlines():
        if found := _GDB_THREAD.match(line):
            number = int(found[1])
            name = MAIN if number == pid else found[2] or ""
            threads.append({"id": number, "name": name[:MAX_NAME], "gil": False, "idle": None, "frames": []})
        elif threads and (found := _GDB_FRAME.match(line)):
            function = "?" if found[1] == "??" else short_name(found[1])
            file = (found[2] or found[4] or "")[-MAX_FILE:]
            threads[-1]["frames"].append((function, file, int(found[3] or 0)))
    if not threads:
        raise ValueError("gdb has shown no thread")
    return threads


_THREAD = re.compile(r"(?:Current t|T)hread 0x[0-9a-f]+ (?:\[(.*)\] )?\(most recent call first\)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_MORE = "..."


def from_faulthandler(text: str) -> list[dict[str, Any]]:
    """Parse the output of ``faulthandler``, which has at most 100 threads.  Skip cpulaunch's own threads.

    The last thread is the main thread, unless threads are missing.
    """
    threads: list[dict[str, Any]] = []
    lines = text.splitlines()
    for line in lines:
        if found := _THREAD.match(line):
            threads.append({"id": None, "name": found[1] or "", "gil": None, "idle": None, "frames": []})
        elif threads and (found := _FRAME.match(line)):
            line_number = int(found[2]) if found[2].isdigit() else 0
            threads[-1]["frames"].append((found[3][:MAX_NAME], found[1][-MAX_FILE:], line_number))
    if threads and _MORE not in lines:
        threads[-1]["name"] = MAIN
    return [thread for thread in threads if not is_own(thread)]


def fit(processes: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Shorten ``processes`` to at most ``limit`` bytes of JSON.

    Omit frames and threads according to LIMITS, then all threads, then processes, until the rest fits.
    """
    for most_threads, most_frames in (*LIMITS, (0, 0)):
        fitting = [_cut(process, most_threads, most_frames) for process in processes]
        if _bytes(fitting) <= limit:
            return fitting
    sizes = itertools.accumulate(_bytes(process) + len(",") for process in fitting)
    return [process for process, size in zip(fitting, sizes, strict=True) if size + len("[]") <= limit]


def _bytes(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def _cut(process: dict[str, Any], most_threads: int, most_frames: int) -> dict[str, Any]:
    """Limit a process's threads and frames.

    The main thread has priority, then busy threads, then idle ones.  A long stack keeps both ends.
    """
    threads = sorted(process["threads"], key=lambda thread: (thread["name"] != MAIN, thread["idle"] is True))
    kept = []
    for thread in threads[:most_threads]:
        frames, over = thread["frames"], len(thread["frames"]) - most_frames
        if over > 0:
            inner = most_frames - most_frames // 3
            frames = [*frames[:inner], *frames[len(frames) - most_frames + inner :]]
        kept.append({**thread, "frames": frames, "left_out": max(0, over)})
    return {**process, "threads": kept, "left_out": len(threads) - len(kept)}
