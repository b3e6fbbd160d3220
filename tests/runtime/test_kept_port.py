"""MASTER_PORT belongs to the job as soon as it is chosen, and the job's program can use it freely."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from discovery.host.test_master_port import NOBODY, needs_root
from support.command import TIMEOUT, Run, bounded, clean_environment, intel_python, processes_with
from support.marks import repeat, slow
from support.plans import make

from cpulaunch.supervise.attempts.attempt import first_attempt

# Successive groups from the environment, and stores of the script.
STORES = """
import os, pathlib
from datetime import timedelta
import torch.distributed as dist
rank, host, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
limit = timedelta(seconds=30)

def meet(name):
    dist.init_process_group("gloo", timeout=limit)
    dist.barrier()
    if rank == 1:  # the next group's store is another one
        while not pathlib.Path(name).exists():
            pass
    dist.destroy_process_group()
    pathlib.Path(name).touch()

def refused(*arguments):
    try:
        dist.TCPStore(*arguments, wait_for_workers=False)
    except RuntimeError as error:
        return "EADDRINUSE" in str(error)

meet("first")
meet("second")
while rank == 1 and not pathlib.Path("listens").exists():  # as the group's store does until then
    pass
store = dist.TCPStore(host, port, 2, rank == 0, limit, False)
pathlib.Path("listens").touch()
store.set(f"from {rank}", "here")
store.wait(["from 0", "from 1"], limit)
if rank == 0:
    again = refused(host, port, 2, True)
    other = dist.TCPStore(host, 0, 1, True)
    print(again, other.port != port)
    store.wait(["done"], limit)
else:
    store.set("done", "")
"""


@pytest.mark.parametrize(
    ("launcher_options", "address"),
    [
        ("local", "127.0.0.1"),
        ("local", "::1"),
        repeat("intel", "::1"),
        slow("mpich", "127.0.0.1"),
        repeat("openmpi", "::1"),
    ],
    indirect=["launcher_options"],
)
def test_successive_stores_of_a_script_listen_on_the_port(
    cpulaunch: Run, tmp_path: Path, launcher_options: list[str], address: str
) -> None:
    (tmp_path / "stores.py").write_text(STORES)
    done = cpulaunch("run", "-n", "2", *launcher_options, "--master-addr", address, "stores.py")
    assert (done.returncode, done.stdout) == (0, "[0] True True\n"), done.stderr


REACHED = """
import os, socket, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    for address in ("127.0.0.1", "127.0.0.2"):
        with socket.socket() as stranger:
            print(stranger.connect_ex((address, int(os.environ["MASTER_PORT"]))))
dist.barrier()
"""


def test_the_store_of_a_local_job_listens_only_on_loopback(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "reached.py").write_text(REACHED)
    done = cpulaunch("run", "-n", "2", "reached.py")
    assert (done.returncode, done.stdout) == (0, f"[0] 0\n[0] {errno.ECONNREFUSED}\n"), done.stderr


@pytest.mark.slow
def test_stores_of_torch_28_listen_on_the_port(tmp_path: Path) -> None:
    (tmp_path / "stores.py").write_text(STORES)
    done = subprocess.run(
        [intel_python(), "-m", "cpulaunch", "run", "-n", "2", "--backend", "gloo", "stores.py"],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[0] True True" in done.stdout.splitlines()


STORE = """
import os
from torch.distributed import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 1, True)
store.set("key", "made")
made = store.get("key").decode()
"""

CHILDREN = {
    "subprocess": "import subprocess, sys\nsubprocess.run([sys.executable, 'store.py'], check=True)",
    "exec": "import os, sys\nos.execv(sys.executable, [sys.executable, 'store.py'])",
    "fork": """
import os
import torch
if os.fork() == 0:
    import store
    print(store.made, flush=True)
    os._exit(0)
assert os.wait()[1] == 0
""",
    "spawn": """
from torch import multiprocessing
def work(number):
    import store
    print(store.made, flush=True)
if __name__ == "__main__":
    multiprocessing.spawn(work, nprocs=1)
""",
}


@pytest.mark.parametrize("how", [repeat("subprocess"), "exec", "fork", repeat("spawn")])
def test_a_child_of_the_script_can_make_the_store(cpulaunch: Run, tmp_path: Path, how: str) -> None:
    (tmp_path / "store.py").write_text(STORE + "if __name__ == '__main__': print(made)")
    (tmp_path / "parent.py").write_text(CHILDREN[how])
    done = cpulaunch("run", "-n", "1", "parent.py", env={"PYTHONPATH": with_path(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr


def with_path(directory: Path) -> str:
    return os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(directory)])


OTHERS = {
    "a socket": "with socket.socket() as s:\n    s.bind(('', port))",
    "a listening socket": "socket.create_server(('127.0.0.1', port)).close()",
    "a server": """
import asyncio
async def serve():
    (await asyncio.start_server(print, "localhost", port)).close()
asyncio.run(serve())""",
    "torch that is not patched": f"os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n{STORE}",
}


@pytest.mark.parametrize("how", OTHERS)
def test_other_uses_of_the_port_work(cpulaunch: Run, tmp_path: Path, how: str) -> None:
    script = f"import os, socket\nport = int(os.environ['MASTER_PORT'])\n{OTHERS[how]}\nprint('done')"
    (tmp_path / "script.py").write_text(script)
    done = cpulaunch("run", "-n", "1", "script.py")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("options", [["--as-written"], ["--no-python"]])
def test_the_port_is_free_with_as_written(cpulaunch: Run, tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "store.py").write_text(f"import socket\n{STORE}print(made)")
    program = [sys.executable, "store.py"] if options == ["--no-python"] else ["store.py"]
    done = cpulaunch("run", "-n", "1", *options, *program)
    assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr


def test_only_the_first_rank_has_the_socket_and_no_child_inherits_it(cpulaunch: Run, tmp_path: Path) -> None:
    sockets = (
        "sum(os.path.realpath(f'/proc/self/fd/{n}').split('/')[-1].startswith('socket') for n in range(99))"
    )
    (tmp_path / "count.py").write_text(
        f"import os, subprocess, sys\ncount = lambda: {sockets}\nprint(count(), flush=True)\n"
        "if os.fork() == 0:\n    print(count(), flush=True)\n    os._exit(0)\n"
        "os.wait()\n"
        f"subprocess.run([sys.executable, '-c', \"import os; print({sockets})\"], close_fds=False)\n"
    )
    done = cpulaunch("run", "-n", "2", "--tee", "all", "count.py")
    assert done.returncode == 0, done.stderr
    assert [line[4:] for line in done.stdout.splitlines() if line.startswith("[0]")] == ["1", "0", "0"]
    assert [line[4:] for line in done.stdout.splitlines() if line.startswith("[1]")] == ["0", "0", "0"]


# Tries to get the port as another user until its stdin ends; prints the number of attempts, and whether one
# succeeded.
HAMMER = f"""
import os, select, socket, sys
os.setuid({NOBODY})
tried = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            s = socket.socket(family)
            s.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                s.bind((address, int(sys.argv[1])))
            except OSError:
                s.close()
                continue
            s.listen()
            print("taken", flush=True)
            sys.exit()
    tried += 1
    if tried == 100:
        print("tried", flush=True)
print("never taken", flush=True)
"""

MEET = """
import os, pathlib, time
def wait_for(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
wait_for("tried")
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "0":
    print("met", flush=True)
wait_for("stopped")
"""


@needs_root
@pytest.mark.parametrize(
    ("launcher_options", "fixed"),
    [
        ("local", False),
        ("local", True),
        slow("intel", False),
        repeat("mpich", False),
        repeat("openmpi", True),
    ],
    indirect=["launcher_options"],
)
def test_another_user_never_gets_the_port(
    marked: dict[str, str], tmp_path: Path, launcher_options: list[str], fixed: bool
) -> None:
    (tmp_path / "meet.py").write_text(MEET)
    options = ["--master-port", free_port()] if fixed else []
    command = [sys.executable, "-m", "cpulaunch", "run", "-n", "2", *launcher_options, *options, "meet.py"]
    job = subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(**marked), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    with bounded(job):
        port = port_of_job(f"TEST_MARK={tmp_path}")
        hammer = subprocess.Popen(
            [sys.executable, "-c", HAMMER, port], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with bounded(hammer):
            assert hammer.stdout
            assert hammer.stdout.readline() == "tried\n"
            (tmp_path / "tried").touch()
            assert job.stdout
            assert job.stdout.readline() == "[0] met\n"
            assert hammer.communicate(timeout=TIMEOUT)[0] == "never taken\n"
        (tmp_path / "stopped").touch()
        assert job.wait(TIMEOUT) == 0


def free_port() -> str:
    import socket

    with socket.create_server(("", 0)) as s:
        return str(s.getsockname()[1])


def port_of_job(mark: str) -> str:
    """The MASTER_PORT of the first process with ``mark`` that has one."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        for pid in processes_with(mark):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            for each in variables:
                if each.startswith(b"MASTER_PORT="):
                    return each.partition(b"=")[2].decode()
    pytest.fail("no process of the job has a MASTER_PORT")


@needs_root
def test_the_launcher_keeps_the_port_until_the_first_rank_does() -> None:
    from discovery.host.test_master_port import taken_by_another_user

    attempt = first_attempt(make(), ())
    assert taken_by_another_user(attempt.master_port) == ""
    attempt.release_port()
    assert taken_by_another_user(attempt.master_port) != ""
