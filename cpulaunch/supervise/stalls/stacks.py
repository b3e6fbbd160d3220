"""Format the stacks of a job's ranks as text; ranks with the same stack share an entry.  Pure.

``agent.observe.processes`` and ``agent.observe.stacks`` make the dicts that this module reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from cpulaunch.model.cores import CoreSet
from cpulaunch.model.hosts import fold_hosts
from cpulaunch.supervise.control.observer_messages import RankStacks

BACKWARD = "_engine_run_backward"
"""The function of torch's autograd in which DistributedDataParallel calls collectives by itself."""

_SAYS_LITTLE = ("wrapper", "<module>", BACKWARD, "_new_process_group_helper", "_new_group_with_tag")
"""Functions with uninformative names; their callers are shown."""

MANY_HOSTS = 3
"""Maximum number of hosts that are named for a set of ranks."""

MUCH_SWAPPED = 10 << 10
"""Minimum kB of swapped memory to report."""

MUCH_THROTTLED = 0.05
"""Minimum share of the time lost to a CPU quota to report."""

Process = dict[str, Any]
T = TypeVar("T")

_LIBCS_OWN = re.compile(r"^__GI_+")
"""The prefix of the internal names of libc's functions."""

MANY_PIDS = 16
"""Maximum number of process ids to show for ranks with the same stack."""

_OURS = re.compile(r"/cpulaunch/(agent|runtime|ccl|integrations|__init__)\b|<frozen runpy>|/runpy\.py$")
_WRAPPER = re.compile(r"<locals>|^(call|wait|init|init_process_group|make_group)$")
"""Our functions that replace torch's, and that call the replaced ones."""
_STANDARD = re.compile(r"/lib(64)?/python3\.\d+/|/python3\.\d+\.zip/|^<frozen ")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_INTERPRETER = re.compile(
    r"/libpython3[^/]*$|/python3?[^/]*$|/Python-3[^/]*/|/_ctypes[^/]*$|/libffi\.so[^/]*$"
)


class Frame(NamedTuple):
    """A frame of a stack.  ``line`` is 0 if unknown."""

    function: str
    file: str
    line: int

    @property
    def short(self) -> str:
        """The function's name without its enclosing classes and functions."""
        return self.function.rpartition(".")[2] if self.is_python else self.function

    @property
    def is_python(self) -> bool:
        return self.file.endswith(".py") or self.file.startswith("<")

    @property
    def is_libc(self) -> bool:
        """Whether the frame is in libc, or in another library without Python."""
        built = self.file.startswith(("../", "./"))  # gdb gives paths of the library's build
        return not self.is_python and (built or bool(re.search(r"\.so\b[^/]*$", self.file)))

    @property
    def has_line(self) -> bool:
        """Whether the line is known, and in a file that users can read."""
        return self.line > 0 and not self.is_libc

    @property
    def is_standard(self) -> bool:
        return bool(_STANDARD.search(self.file)) and not _INSTALLED.match(self.file)

    @property
    def is_ours(self) -> bool:
        return bool(_OURS.search(self.file))

    @property
    def is_users(self) -> bool:
        """Whether the frame is in the user's own code, not in an installed package or in Python."""
        outside = self.is_standard or _INSTALLED.match(self.file) or self.file.startswith("<")
        return self.is_python and not outside and not self.is_ours

    def __str__(self) -> str:
        return f"{self.function}  {_INSTALLED.sub('', self.file)}" + (f":{self.line}" if self.line else "")


Stack = tuple[Frame, ...]


def stack(thread: Process) -> Stack:
    """Return a thread's frames, the innermost first, without those of the interpreter and of cpulaunch."""
    frames = [
        Frame(_LIBCS_OWN.sub("", str(name)), str(file), int(line))
        for name, file, line in thread.get("frames", ())
    ]
    return tuple(
        frame
        for frame in frames
        if frame.function != "?"
        and not (frame.is_python and re.search(r"/cpulaunch/agent/|/runpy\.py$|<frozen runpy>", frame.file))
        and not ("/cpulaunch/runtime/" in frame.file and _WRAPPER.search(frame.function))
        and not (not frame.is_python and _INTERPRETER.search(frame.file))
    )


def place(frames: Stack) -> str:
    """Describe a stack in a few words: ``all_reduce ← train.py:91``, ``load_batch at train.py:88``.

    The place is the user's innermost frame.  Before the arrow is the innermost function of a package that
    this frame has called, or else the function of Python or of a C library that it has called.
    """
    if not frames:
        return "no frames"
    users = next((number for number, frame in enumerate(frames) if frame.is_users), None)
    if users is None:
        python = any(frame.is_python for frame in frames)
        return (_called(frames) if python else None) or frames[0].short
    frame = frames[users]
    where = f"{frame.file.rpartition('/')[2]}:{frame.line}"
    called = _called(frames[:users])
    if called is None or called == frame.short:
        return f"{frame.short} at {where}"
    return f"{called} ← {where}"


def _called(inner: Stack) -> str | None:
    """Return the most informative function of ``inner``, the frames inside the user's innermost one."""
    python = [frame for frame in inner if frame.is_python]
    candidates = [frame for frame in python if not frame.is_standard and not frame.is_ours]
    candidates = [frame for frame in candidates if frame.short not in _SAYS_LITTLE] or candidates
    if candidates:
        return candidates[0].short
    native = [frame for frame in inner if not frame.function.startswith("pybind11::")]
    return (python or native or inner)[-1].short if inner else None


def threads_of(process: Process) -> list[Process]:
    return process.get("threads") or []


def main_thread(process: Process) -> Process | None:
    return next((thread for thread in threads_of(process) if thread.get("name") == "MainThread"), None)


def main_stack(process: Process) -> Stack:
    """Return the stack of a process's main thread; empty if not known."""
    return stack(main) if (main := main_thread(process)) else ()


def surviving_thread(process: Process) -> Process | None:
    """Return the thread that the main thread waits for after the end of the script, if any.

    This is the first thread that runs the user's code, or else the first thread whose target is a C function,
    such as `time.sleep`.  Other threads may be daemons, for which Python doesn't wait.
    """
    main = main_stack(process)
    if not any(frame.short == "_shutdown" and frame.file.endswith("/threading.py") for frame in main):
        return None
    others = [each for each in threads_of(process) if each["name"] != "MainThread"]
    users = (each for each in others if any(frame.is_users for frame in stack(each)))
    return next(users, None) or next(filter(_runs_c, others), None)


def _runs_c(thread: Process) -> bool:
    """Whether the target of a thread is a C function: all of its Python frames are in ``threading``."""
    python = [frame for frame in stack(thread) if frame.is_python]
    return bool(python) and all(frame.file.endswith("/threading.py") for frame in python)


def special_states(process: Process) -> list[str]:
    """Describe what is unusual about a process's state; empty if it runs or sleeps normally."""
    said = []
    if process.get("state") == "T":
        said.append(f"stopped ({process.get('stopped_by') or 'SIGSTOP'})")
    if process.get("traced_by"):
        said.append(f"a debugger (pid {process['traced_by']}, {process.get('tracer')}) holds it")
    for thread in process.get("blocked") or ():
        if thread.get("file"):
            said.append(f"waits for a disk: {thread['call']} of {thread['file']}")
        elif thread.get("call"):
            said.append(f"waits for a disk: {thread['call']}")
        else:
            said.append(f"in uninterruptible sleep in the kernel: {thread.get('wchan') or 'unknown'}")
    quota = process.get("throttled") or {}
    if quota.get("share", 0) >= MUCH_THROTTLED:
        said.append(f"throttled {quota['share']:.0%} by its cgroup".replace("%", " %"))
    if process.get("swapped", 0) >= MUCH_SWAPPED:
        said.append(f"{process['swapped'] / (1 << 20):.1f} GB swapped out")
    if file := waits_for_file(process):
        said.append(f"waits in {process['call']} of {file}")
    return list(dict.fromkeys(said))


def waits_for_file(process: Process) -> str:
    """Return the file, such as a named pipe, that the process waits for in a system call, or ""."""
    file = process.get("file") or ""
    waits = process.get("state") == "S" and file.startswith("/") and not file.startswith(("/dev/", "/memfd:"))
    return file if waits else ""


def report(stacks: Sequence[RankStacks]) -> str:
    """Return a report on all ranks: their states, and each stack once, with its ranks."""
    return "\n".join(_lines(stacks)).lstrip("\n") + "\n"


def place_lines(
    stacks: Sequence[RankStacks], called: Mapping[int, str] = MappingProxyType({})
) -> Iterator[str]:
    """Yield a line for each place of the ranks' main threads: ``[0-2,4-15] all_reduce ← train.py:91``.

    ``called`` has the operations of ranks; they are shown for the backward pass, where stacks lack them.
    """
    programs = [each for each in stacks if each.processes]

    def where(each: RankStacks) -> str:
        frames = main_stack(program := _program(each))
        if thread := surviving_thread(program):
            return f"{place(stack(thread))}, in its thread {thread['name']}"
        if not frames:
            return f"{program.get('command')}: {program.get('word')}"
        operation = called.get(each.rank) if any(frame.function == BACKWARD for frame in frames) else None
        return f"{operation} in {place(frames)}" if operation else place(frames)

    for found, group in _group_by(programs, where):
        yield f"{name_ranks(group, stacks)} {found}"


def missing_frames(stacks: Sequence[RankStacks]) -> Iterator[str]:
    """Yield a line for each reason why programs had to write their stacks themselves, with less detail."""

    def why(each: RankStacks) -> str:
        program = _program(each)
        return str(program.get("lacking")) if program.get("stacks") == "faulthandler" else ""

    for reason, group in _group_by([each for each in stacks if each.processes], why):
        if reason:
            yield f"{name_ranks(group, stacks)} {reason}: stacks have no frames of C, and threads no names"


def _lines(stacks: Sequence[RankStacks]) -> Iterator[str]:
    for how, group in _group_by([each for each in stacks if each.left], lambda each: each.left):
        yield f"{name_ranks(group, stacks)} {'has' if len(group) == 1 else 'have'} left: {how}"
    silent = [each for each in stacks if each.processes is None and not each.left]
    for why, group in _group_by(silent, lambda each: each.error):
        yield f"{name_ranks(group, stacks)} no answer" + (f": {why}" if why else "")
    for why, group in _group_by(
        [each for each in stacks if each.processes is not None], lambda each: each.error
    ):
        if why:
            yield f"{name_ranks(group, stacks)} {why}"
    yield from missing_frames(stacks)
    programs = [each for each in stacks if each.processes]
    for said, group in _group_by(programs, lambda each: tuple(special_states(_program(each)))):
        for words in said:
            yield f"{name_ranks(group, stacks)} {words}"
    for key, group in _group_by(programs, _key_of_program):
        yield ""
        shown_by = {each for every in group if (each := _program(every).get("native_of")) is not None}
        native = f" (frames of C and C++ are those of rank {CoreSet(shown_by)})" if shown_by else ""
        title, *frames = _program_lines(key, name_ranks(group, stacks), _program(group[0]), native)
        yield from (title, _pids(group), *frames)
        yield from _threads(group, stacks)
    yield from _children(programs, stacks)


def _pids(group: Sequence[RankStacks]) -> str:
    pids = [str(_program(each).get("pid")) for each in group]
    more = [f"… {len(pids) - MANY_PIDS} more"] if len(pids) > MANY_PIDS else []
    return f"  pid{'s' if len(pids) > 1 else ''} {', '.join([*pids[:MANY_PIDS], *more])}"


def _program(each: RankStacks) -> Process:
    assert each.processes
    return each.processes[0]


def _key_of_program(each: RankStacks) -> tuple[Stack, str]:
    """Return the main thread's stack and, if it is empty, the reason."""
    program = _program(each)
    frames = main_stack(program)
    return frames, "" if frames else str(program.get("lacking", ""))


def _program_lines(key: tuple[Stack, str], ranks: str, program: Process, native: str) -> Iterator[str]:
    frames, why = key
    if frames:
        yield f"{ranks} {place(frames)}{native}"
        yield from _frames(frames)
    else:
        where = f", in {program['wchan']} of the kernel" if program.get("wchan") else ""
        yield f"{ranks} {program.get('command')}: {program.get('word')}{where}; no stack: {why or 'unknown'}"


def _threads(group: Sequence[RankStacks], stacks: Sequence[RankStacks]) -> Iterator[str]:
    """Describe the threads other than the main threads; threads with the same stack share an entry."""
    others = [
        (each, str(thread.get("name")) or "thread", stack(thread))
        for each in group
        for thread in threads_of(_program(each))
        if thread.get("name") != "MainThread"
    ]
    for frames, folded in _group_by([other for other in others if other[2]], lambda other: other[2]):
        names = list(dict.fromkeys(name for _, name, _ in folded))
        ranks = {each.rank for each, _, _ in folded}
        some = "" if len(ranks) == len(group) else f"{name_ranks([each for each, _, _ in folded], stacks)} "
        most = max(sum(each.rank == rank for each, _, _ in folded) for rank in ranks)
        title = f"thread {names[0]}" if most == 1 else f"{most} threads ({names[0]}, …)"
        yield f"  {some}{title}: {place(frames)}"
        if any(frame.is_users for frame in frames):
            yield from _frames(frames, "      ")


def _children(programs: Sequence[RankStacks], stacks: Sequence[RankStacks]) -> Iterator[str]:
    """Describe the programs' children; children with the same stack and state share an entry."""
    children = [(each, child) for each in programs for child in (each.processes or ())[1:]]

    def key(found: tuple[RankStacks, Process]) -> tuple[Any, ...]:
        frames = main_stack(found[1])
        return frames, tuple(special_states(found[1])), None if frames else found[1].get("command")

    for (frames, said, command), folded in _group_by(children, key):
        group = list({each.rank: each for each, _ in folded}.values())
        first = folded[0][1]
        what = f"child {first.get('pid')}" if len(folded) == 1 else f"{len(folded)} children"
        yield ""
        place_or_state = place(frames) if frames else f"{command}: {first.get('word')}"
        yield f"{name_ranks(group, stacks)} {what}: {'; '.join([*said, place_or_state])}"
        yield from _frames(frames)


def _frames(frames: Stack, indent: str = "    ") -> Iterator[str]:
    for frame in frames:
        yield f"{indent}{frame}"


def name_ranks(group: Iterable[RankStacks], stacks: Sequence[RankStacks]) -> str:
    """Name ranks as ``[0-2,4-15]``, with their hosts if the job has several and the ranks have few."""
    group = list(group)
    ranks = f"[{CoreSet(each.rank for each in group)}]"
    hosts = list(dict.fromkeys(each.host for each in group))
    if len({each.host for each in stacks}) == 1 or len(hosts) > MANY_HOSTS:
        return ranks
    return f"{ranks} on {fold_hosts(hosts)}:"


def _group_by(group: Iterable[T], key: Callable[[T], Any]) -> list[tuple[Any, list[T]]]:
    """Group by equal keys.  The smallest group is first, as the other ranks may wait for it."""
    groups: dict[Any, list[T]] = {}
    for each in group:
        groups.setdefault(key(each), []).append(each)
    return sorted(groups.items(), key=lambda group: len(group[1]))
