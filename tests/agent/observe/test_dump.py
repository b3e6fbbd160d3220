"""Dumps of real programs in various states, with the real py-spy."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.agents import PlayedLauncher, placement
from support.command import REPOSITORY, TIMEOUT, bounded
from support.hung_files import hung_file
from support.namespaces import until

from cpulaunch import variables
from cpulaunch.agent.observe import processes
from cpulaunch.agent.observe.dump import Dumps, Observation, _Tool, find_tool
from cpulaunch.agent.observe.stacks import from_py_spy
from cpulaunch.messages import AskDump, AskTime, Dump, Exit, Release, Started, Time
from cpulaunch.supervise.stalls.stacks import main_stack, place, special_states

PY_SPY = shutil.which("py-spy") is not None
needs_py_spy = pytest.mark.skipif(not PY_SPY, reason="py-spy is not installed")

WAIT = """\
import threading, time
def load_batch():
    time.sleep(1000)
thread = threading.Thread(target=load_batch, name="loader", daemon=True)
thread.start()
print("ready", flush=True)
thread.join()
"""

LOCKED = """\
import ctypes
libc = ctypes.PyDLL(None)  # its calls keep the GIL
print("ready", flush=True)
libc.sleep(1000)
"""

WORKER = """\
import os, time
def hang():
    if os.fork() == 0:
        time.sleep(1000)
    print("ready", flush=True)
    os.wait()
hang()
"""


@contextlib.contextmanager
def launcher(
    directory: Path, program: str, *, is_python: bool = True, **options: Any
) -> Iterator[PlayedLauncher]:
    """A launcher, played by the test, whose program has printed "ready"."""
    with PlayedLauncher(placement(directory, python=is_python), program, **options) as played:
        played.welcome()
        played.pid = played.next(Started).pid
        played.wait_for_output("ready")
        try:
            yield played
        finally:  # children of the program would outlive an agent that is killed
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(played.agent.pid).children(recursive=True):
                    each.kill()


def dump(played: PlayedLauncher, native: bool = False, request: int = 1) -> list[dict[str, Any]]:
    played.say(AskDump(request, native))
    answer = played.next(Dump)
    assert (answer.request, answer.error) == (request, "")
    return answer.processes


def functions(process: dict[str, Any], thread: str = "MainThread") -> list[str]:
    (found,) = [each for each in process["threads"] if each["name"] == thread]
    return [frame[0] for frame in found["frames"]]


def with_bin(directory: Path, py_spy: str | None = None) -> dict[str, Any]:
    """Options for an agent that finds no real py-spy, only the shell script ``py_spy`` if one is given."""
    place = directory / "bin"
    place.mkdir()
    (place / "python").symlink_to(os.path.realpath(sys.executable))
    if py_spy:
        (place / "py-spy").write_text(f"#!/bin/sh\n{py_spy}\n")
        (place / "py-spy").chmod(0o755)
    env = {"PATH": "/nowhere", "PYTHONPATH": str(REPOSITORY)}
    return {"env": env, "python": str(place / "python")}


@needs_py_spy
def test_threads_and_their_frames(tmp_path: Path) -> None:
    with launcher(tmp_path, WAIT) as played:
        (program,) = dump(played)
    assert (program["pid"], program["state"], program["stacks"]) == (played.pid, "S", "py-spy")
    assert functions(program, "loader")[0] == "load_batch"
    (loader,) = [thread for thread in program["threads"] if thread["name"] == "loader"]
    assert loader["frames"][0] == ["load_batch", str(tmp_path / "program.py"), 3]
    assert loader["idle"] is True


@needs_py_spy
def test_a_c_function_that_waits_with_the_gil_is_shown(tmp_path: Path) -> None:
    with launcher(tmp_path, LOCKED) as played:
        (program,) = dump(played, native=True)
    (main,) = program["threads"]
    names = functions(program)
    assert main["gil"] is True
    assert names.index("sleep") < names.index("<module>")


def test_without_py_spy_the_program_writes_its_stacks_itself(tmp_path: Path) -> None:
    with launcher(tmp_path, WAIT, **with_bin(tmp_path)) as played:
        for _ in range(2):  # the second dump doesn't have to wait for the first
            (program,) = dump(played)
            assert (program["stacks"], program["lacking"]) == ("faulthandler", "py-spy was not found")
            assert len(program["threads"]) == 2
            assert functions(program)[0] == "_wait_for_tstate_lock" or "join" in functions(program)


@pytest.mark.parametrize("tool", [pytest.param("py-spy", marks=needs_py_spy), "faulthandler"])
def test_a_child_process_that_hangs_is_shown(tmp_path: Path, tool: str) -> None:
    with launcher(tmp_path, WORKER, **(with_bin(tmp_path) if tool == "faulthandler" else {})) as played:
        program, child = dump(played)
    assert child["parent"] == program["pid"] == played.pid
    assert program["stacks"] == child["stacks"] == tool
    assert functions(program)[:2] == functions(child)[:2] == ["hang", "<module>"]
    assert [each["threads"][0]["frames"][0][2] for each in (program, child)] == [6, 4]


@needs_py_spy
def test_a_stopped_program_is_reported_and_stays_stopped(tmp_path: Path) -> None:
    with launcher(tmp_path, WAIT) as played:
        os.kill(played.pid, signal.SIGSTOP)
        (program,) = dump(played, native=True)
        assert (program["state"], program["stopped_by"]) == ("T", "SIGSTOP")
        assert functions(program, "loader")[0] == "load_batch"
        assert "State:\tT" in Path(f"/proc/{played.pid}/status").read_text()
        os.kill(played.pid, signal.SIGCONT)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_debugger_that_traces_the_program_is_named(tmp_path: Path) -> None:
    with launcher(tmp_path, WAIT) as played:
        argv = ["strace", "-e", "trace=none", "-p", str(played.pid)]
        with bounded(subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)) as tracer:
            assert tracer.stderr
            assert "attached" in tracer.stderr.readline()
            (program,) = dump(played, native=True)
            assert (program["traced_by"], program["tracer"]) == (tracer.pid, "strace")


def test_the_agent_works_while_py_spy_hangs_and_resumes_the_program(tmp_path: Path) -> None:
    """py-spy stops the program and never ends.  Later requests are still answered in time."""
    hangs = f'echo >>{tmp_path}/spies; while [ "$1" != --pid ]; do shift; done; kill -STOP $2; exec /bin/sleep 1000'
    with launcher(tmp_path, WAIT, **with_bin(tmp_path, hangs)) as played:
        played.say(AskDump(1, False))
        played.say(AskDump(2, True))
        played.say(AskTime())
        while not isinstance(message := played.hear(), Time):
            assert not isinstance(message, Dump)
        for request in (1, 2):
            answer = played.next(Dump)
            assert (answer.request, answer.processes[0]["lacking"]) == (request, "not within 8 s")
        assert (tmp_path / "spies").read_text() == "\n"
        assert "State:\tT" not in Path(f"/proc/{played.pid}/status").read_text()
        agent = psutil.Process(played.agent.pid)
        until(lambda: [each.pid for each in agent.children()] == [played.pid], "py-spy to be reaped")


def test_processes_that_do_not_fit_into_the_answer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpulaunch.agent.observe.dump.MAX_DUMP", 3000)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    children = [subprocess.Popen(["/bin/sleep", "1000"]) for _ in range(12)]
    try:
        answers: list[Dump] = []
        dumps = Dumps(selectors.DefaultSelector(), None, answers.append)
        dumps.ask(AskDump(1, False))
        until(lambda: dumps.check_time() or answers, "the answer")
        family = list(processes.family(os.getpid()))  # includes processes that other tests have started
        left_out = len(family) - len(answers[0].processes)
        assert 0 < left_out < len(family)
        assert f"{left_out} more processes are left out: too much to send" in answers[0].error
    finally:
        for child in children:
            child.kill()
            child.wait(TIMEOUT)


def test_the_sweep_counts_py_spy_as_part_of_the_job(tmp_path: Path) -> None:
    """If the agent is killed, a py-spy that hangs is left behind."""
    hangs = "exec /bin/sleep 1000"
    options = with_bin(tmp_path, hangs)
    options["env"][variables.JOB_ID] = job_id = f"test-{os.getpid()}"
    with launcher(tmp_path, WAIT, **options) as played:
        played.say(AskDump(1, False))
        agent = psutil.Process(played.agent.pid)
        until(lambda: "sleep" in [each.name() for each in agent.children()], "py-spy to be started")
        (spy,) = [each for each in agent.children() if each.name() == "sleep"]
        assert spy.environ()[variables.JOB_ID] == job_id


@needs_py_spy
def test_a_py_spy_that_still_runs_is_not_listed_as_a_process_of_the_program() -> None:
    py_spy = find_tool("py-spy", os.environ)
    assert py_spy
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    spy = subprocess.Popen(
        [py_spy, "record", "--duration", "1000", "--output", os.devnull, "--pid", str(sleeper.pid)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # An exiting process has no command line.
    exiting = subprocess.Popen(["py-spy"], executable=shutil.which("cat"), stdin=subprocess.PIPE)
    try:
        observation = Observation(AskDump(1, False), 0.0, sleeper.pid, selectors.DefaultSelector(), None)
        described = [each["pid"] for each in observation.processes]
        assert sleeper.pid in described
        assert not {spy.pid, exiting.pid} & {*described}
        assert spy.poll() is None
    finally:
        for child in (spy, exiting, sleeper):
            child.kill()
            child.wait(TIMEOUT)


def test_a_py_spy_that_was_reaped_before_its_output_was_read_is_no_error() -> None:
    selector = selectors.DefaultSelector()
    spy = _Tool(["/bin/true"], {"pid": os.getpid()}, selector, from_py_spy, stops=False)
    os.waitpid(spy._pid, 0)
    spy.kill()
    assert spy.ended
    assert not selector.get_map()


def test_a_program_writes_its_stacks_itself_if_ptrace_is_forbidden(tmp_path: Path) -> None:
    refuses = "echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1"
    with launcher(tmp_path, WAIT, **with_bin(tmp_path, refuses)) as played:
        (program,) = dump(played)
    assert program["stacks"] == "faulthandler"
    assert program["lacking"] == "py-spy may not look (ptrace is forbidden)"
    assert functions(program, "MainThread")[-1] == "<module>"


def test_a_program_may_end_during_the_dump(tmp_path: Path) -> None:
    with launcher(tmp_path, WAIT) as played:
        os.kill(played.pid, signal.SIGKILL)
        played.next(Exit)
        played.say(AskDump(1, False))
        assert played.next(Dump).error == "its program has ended, or was not started"
        played.say(Release())
        assert played.end()[0] == 0


def test_dumps_do_not_change_the_program(tmp_path: Path) -> None:
    """Its output and exit code stay the same."""
    program = "import sys\nprint('ready', flush=True)\nfor _ in range(3): print(sys.stdin)\nsys.exit(7)\n"
    program = program.replace("print(sys.stdin)", "import time; time.sleep(0.3)")
    with launcher(tmp_path, program) as played:
        for request in range(20):
            played.say(AskDump(request, request % 2 == 1))
        exit_ = played.next(Exit)
        assert (exit_.code, exit_.signal) == (7, None)
        played.say(Release())
        code, out, err = played.end()
        assert (code, out, err) == (0, "", "")


READS = """\
import sys, threading
def read():
    open(sys.stdin.readline().strip(), "rb", buffering=0).read(10)
thread = threading.Thread(target=read)
thread.start()
print("ready", flush=True)
thread.join()
"""


@needs_py_spy
def test_a_disk_that_hangs_is_named_with_the_file(tmp_path: Path) -> None:
    with hung_file(tmp_path / "disk") as file:
        program = READS.replace("sys.stdin.readline().strip()", repr(str(file)))
        with launcher(tmp_path, program) as played:
            until_blocked(played.pid)
            (seen,) = dump(played, native=True)
            (thread,) = seen["blocked"]
            assert (thread["call"], thread["file"]) == ("read", str(file))
            assert special_states(seen) == [f"waits for a disk: read of {file}"]
            # The report has the short name, because reading the command line might block.
            assert seen["command"] == Path(f"/proc/{played.pid}/comm").read_text().strip()
            (waiting,) = [each for each in seen["threads"] if each["id"] == thread["thread"]]
            assert waiting["frames"][0][0] == "read"


def until_blocked(pid: int) -> None:
    def blocked() -> bool:
        return any("State:\tD" in path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status"))

    until(blocked, "a thread to wait for the disk")


BUSY = """\
print("ready", flush=True)
while True: pass
"""


@needs_py_spy
def test_a_quota_that_delays_the_program_is_named(tmp_path: Path, cpu_group: Path) -> None:
    with launcher(tmp_path, BUSY) as played:
        (cpu_group / "cgroup.procs").write_text(str(played.pid))
        periods = cpu_group / "cpu.stat"
        until(lambda: "nr_throttled 0" not in periods.read_text(), "the quota to be used up")
        (program,) = dump(played)
        assert program["throttled"]["quota"] == 0.05
        assert program["throttled"]["share"] > 0.2
        assert special_states(program)[0].startswith("throttled ")
        assert program["stacks"] == "py-spy"
        os.kill(played.pid, signal.SIGKILL)
        played.next(Exit)


def test_a_program_without_python(tmp_path: Path) -> None:
    """The program is a shell with a child process."""
    arguments = ["/bin/sh", "-c", "echo ready; sleep 1000; exit"]
    with launcher(tmp_path, "", is_python=False, arguments=arguments) as played:
        until(lambda: psutil.Process(played.agent.pid).children()[0].children(), "the shell to start it")
        shell, sleep = dump(played)
    assert (shell["state"], sleep["command"]) == ("S", "sleep 1000")
    assert sleep["wchan"]
    assert shell["stacks"] == ""
    assert shell["lacking"] == ("it is not a Python program" if PY_SPY else "py-spy was not found")
    assert shell["python"] is (not PY_SPY)


@needs_py_spy
@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_gdb_shows_the_stack_of_a_program_without_python_if_native_frames_are_wanted(tmp_path: Path) -> None:
    arguments = ["/bin/sh", "-c", "echo ready; sleep 1000; exit"]
    with launcher(tmp_path, "", is_python=False, arguments=arguments) as played:
        until(lambda: psutil.Process(played.agent.pid).children()[0].children(), "the shell to start it")
        assert dump(played)[0]["threads"] == []
        shell, sleep = dump(played, native=True, request=2)
        assert [(each["stacks"], each["python"]) for each in (shell, sleep)] == [("gdb", False)] * 2
        assert any("wait" in name for name in functions(shell))
        assert any("nanosleep" in name for name in functions(sleep))
        status = Path(f"/proc/{sleep['pid']}/status")
        until(lambda: "State:\tS" in status.read_text(), "sleep to sleep again")


@needs_py_spy
def test_python_frames_are_shown_if_c_frames_are_unreadable(tmp_path: Path) -> None:
    """This happens if a rank gets no CPU time."""
    refuses = 'case "$*" in *--native*) echo "Error: UNW_EBADREG" >&2; exit 1;; esac'
    script = f'{refuses}; exec {shutil.which("py-spy")} "$@"'
    with launcher(tmp_path, WAIT, **with_bin(tmp_path, script)) as played:
        played.say(AskDump(1, True))
        found = played.next(Dump)
    (program,) = found.processes
    assert (program["stacks"], functions(program, "loader")[0]) == ("py-spy", "load_batch")
    assert found.error == "has shown no frames of C: py-spy: UNW_EBADREG"


LOADER = """\
import os, time, torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 8
    def __getitem__(self, n):
        if n == 3: self.fetch()
        return torch.zeros(1)
    def fetch(self):
        print("ready", flush=True)
        time.sleep(1000)
for batch in DataLoader(Slow(), num_workers=1): pass
"""


@needs_py_spy
@pytest.mark.slow
def test_a_data_loader_worker_that_hangs_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with launcher(tmp_path, LOADER) as played:
        program, *children = dump(played)
    assert "fetch at program.py:10" in [place(main_stack(child)) for child in children]
    assert place(main_stack(program)) == "_try_get_data ← program.py:11"
