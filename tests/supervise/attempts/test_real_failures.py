"""Real jobs in which ranks or agents fail: the rank that is named, and the launcher's exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from support.command import TIMEOUT, Run, bounded, mpi_options, processes_with
from support.jobs import box, job, outcome
from support.marks import repeat, slow, usually_under
from support.programs import UNTIL_TOLD

from cpulaunch.supervise.attempts import start


@usually_under("local", "mpich")
def test_a_killed_agent_is_a_killed_rank_and_its_program_ends(
    launcher_options, marked, tmp_path: Path
) -> None:
    with job(tmp_path, marked, launcher_options, UNTIL_TOLD) as launcher:
        (plan,) = tmp_path.glob("runs/*/plan.json")
        assert json.loads(plan.read_text())["world_size"] == 2
        program = next(
            pid for pid in processes_with("LOCAL_RANK=1") if pid in processes_with(f"TEST_MARK={tmp_path}")
        )
        os.kill(psutil.Process(program).ppid(), signal.SIGKILL)
        assert launcher.wait(TIMEOUT) == 137
    assert program not in processes_with("LOCAL_RANK=1")  # gone, or a zombie that no init reaps
    assert outcome(tmp_path)["first_failure"]["rank"] == 1


def test_an_agent_that_dies_before_its_hello_is_noticed(cpulaunch: Run, marked, tmp_path: Path) -> None:
    """The program kills its agent at its start, mostly before the agent's hello."""
    (tmp_path / "kill.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getppid(), 9)\ntime.sleep(300)"
    )
    done = cpulaunch("run", "-n", "2", "kill.py", env=marked)
    result = outcome(tmp_path)
    assert (done.returncode, result["kind"]) in ((3, "start_failed"), (137, "signal"))
    assert result["first_failure"]["rank"] == 1


@pytest.mark.parametrize("mpi", [repeat("intel"), repeat("mpich"), slow("openmpi")])
def test_a_killed_mpiexec_is_named_and_leaves_nothing(mpi: str, marked, tmp_path: Path) -> None:
    """Open MPI's mpiexec has a directory, which its guard removes."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**marked, "TMPDIR": str(temporary)}
    with job(tmp_path, env, mpi_options(mpi), UNTIL_TOLD) as launcher:
        started = psutil.Process(launcher.pid).children()
        guards = [process for process in started if any("guard.py" in word for word in process.cmdline())]
        (mpiexec,) = set(started) - set(guards)
        made = [path.name for path in temporary.glob("ompi.*")]
        assert made == ([f"ompi.{mpiexec.pid}"] if mpi == "openmpi" else [])
        mpiexec.kill()
        assert launcher.wait(TIMEOUT) == 137
        psutil.wait_procs(guards, TIMEOUT)
    assert re.fullmatch(
        r"\S+ got SIGKILL, not from cpulaunch, and the rank's agent ended with it",
        outcome(tmp_path)["first_failure"]["error"],
    )
    assert list(temporary.glob("ompi.*")) == []


@pytest.mark.parametrize(("leaves", "left"), [("ompi.{pid}", 0), ("", 1)])
def test_a_guard_removes_only_files_of_mpiexec(
    leaves: str, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with bounded(subprocess.Popen(["true"], text=True)) as mpiexec:
        its, other = tmp_path / f"ompi.{mpiexec.pid}", tmp_path / "other"
        its.mkdir()
        other.mkdir()
        guard, told = start.start_guard(0.0, "no job", leaves)
        os.write(told, str(mpiexec.pid).encode())
        os.close(told)
        assert guard.wait(TIMEOUT) == 0
    assert (its.exists(), other.exists()) == (left, True)


def test_a_guard_of_a_command_that_was_never_started_ends() -> None:
    guard, told = start.start_guard(0.0, "no job", "")
    os.close(told)
    assert guard.wait(TIMEOUT) == 0


UPLOADS = """
import os, pathlib, time, urllib.request
import torch, torch.distributed as dist
backend = {backend!r}
dist.init_process_group(backend)
dist.all_reduce(torch.ones(1000))
if os.environ["RANK"] == "1":
    dist.destroy_process_group()
    raise SystemExit(0)
while "exit" not in pathlib.Path({directory!r}, "events.jsonl").read_text():
    time.sleep(0.01)
urllib.request.urlopen("http://127.0.0.1:9/upload")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", [repeat("ccl"), "gloo"])
def test_a_ranks_own_failed_connection_is_not_blamed_on_ended_ranks(
    cpulaunch: Run, backend: str, marked, tmp_path: Path
) -> None:
    code = UPLOADS.format(backend=backend, directory="DIRECTORY").replace("'DIRECTORY'", "next(iter(runs()))")
    runs = "def runs(): return pathlib.Path('runs').iterdir()\n"
    (tmp_path / "train.py").write_text("import pathlib\n" + runs + code)
    done = cpulaunch("run", "-n", "2", "--backend", backend, "train.py", env=marked)
    first = outcome(tmp_path)["first_failure"]
    assert "Connection refused" in first["error"]
    assert (done.returncode, first["rank"], first["ranks"], first["note"]) == (1, 0, [], None)
    assert first["cause"] == {"kind": "exception"}
    assert box(done.stderr)[0] == "rank 0 on localhost failed first"
