"""Programs run by `cpulaunch run` behave as if run by `python train.py`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from support.command import TIMEOUT, Run, clean_environment
from support.jobs import outcome

# Rank 1 ends after the process of rank 0.
ONE_AFTER_THE_OTHER = """
import os, pathlib, time
first = pathlib.Path("first")
if os.environ["RANK"] == "0":
    first.symlink_to(f"/proc/{os.getpid()}")
else:
    while not first.is_symlink() or first.exists(): time.sleep(0.02)
"""


class TestPlainPython:
    """Programs behave as if run by `python train.py`."""

    def test_spawned_children_find_the_main_module(self, cpulaunch: Run, tmp_path) -> None:
        (tmp_path / "spawn.py").write_text(
            "import multiprocessing as mp\ndef work(x): return x * x\n"
            "if __name__ == '__main__':\n    with mp.get_context('spawn').Pool(1) as p: print(p.map(work, [3]))\n"
        )
        done = cpulaunch("run", "-n", "1", "spawn.py")
        assert done.stdout == "[9]\n", done.stderr

    def test_a_rank_may_exit_with_0_before_the_others(self, cpulaunch: Run, tmp_path) -> None:
        (tmp_path / "early.py").write_text(ONE_AFTER_THE_OTHER)
        assert cpulaunch("run", "-n", "2", "early.py").returncode == 0
        assert [r["status"] for r in outcome(tmp_path)["ranks"]] == ["exit 0", "exit 0"]

    def test_syntax_errors_are_reported_with_file_and_line(self, cpulaunch: Run, tmp_path) -> None:
        (tmp_path / "bad.py").write_text("x = 1\ny = = 2\n")
        assert cpulaunch("run", "-n", "2", "bad.py").returncode == 1
        first = outcome(tmp_path)["first_failure"]
        assert (first["file"], first["line"]) == ("bad.py", 2)
        assert first["error"].startswith("SyntaxError: ")

    def test_processes_left_behind_by_a_finished_program_are_ended(
        self, cpulaunch: Run, tmp_path, marked
    ) -> None:
        (tmp_path / "leave.py").write_text(
            "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True)"
        )
        done = cpulaunch("run", "-n", "2", "--grace-period", "0.2", "leave.py", env=marked)
        assert done.returncode == 0

    def test_the_users_modules_do_not_shadow_ours(self, tmp_path) -> None:
        for name in ("selectors", "socket", "json", "asyncio", "signal"):
            (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
        command = [
            Path(sys.executable).with_name("cpulaunch"),
            "run",
            "-n",
            "2",
            "--no-python",
            "echo",
            "ran",
        ]
        done = subprocess.run(
            command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=TIMEOUT
        )
        assert sorted(done.stdout.splitlines()) == ["[0] ran", "[1] ran"], done.stderr

    def test_dunder_file_is_absolute_and_threads_can_still_use_the_main_module(
        self, cpulaunch: Run, tmp_path
    ) -> None:
        (tmp_path / "late.py").write_text(
            "import pickle, threading\nclass C: pass\n"
            "def late():\n    threading.main_thread().join()\n    print(len(pickle.dumps(C())) > 0, __file__)\n"
            "threading.Thread(target=late).start()\n"
        )
        done = cpulaunch("run", "-n", "1", "late.py")
        assert done.stdout == f"True {tmp_path}/late.py\n", done.stderr

    def test_directories_and_zip_files_can_be_run(self, cpulaunch: Run, tmp_path) -> None:
        (tmp_path / "app").mkdir()
        (tmp_path / "app" / "__main__.py").write_text("import helper; print(helper.WORD)")
        (tmp_path / "app" / "helper.py").write_text("WORD = 'helped'")
        with zipfile.ZipFile(tmp_path / "app.zip", "w") as z:
            for name in ("__main__.py", "helper.py"):
                z.write(tmp_path / "app" / name, name)
        for program in ("app", "app.zip"):
            done = cpulaunch("run", "-n", "1", program)
            assert done.stdout == "helped\n", done.stderr

    def test_a_fatal_signal_determines_the_exit_code(self, cpulaunch: Run, tmp_path) -> None:
        (tmp_path / "int.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
        assert cpulaunch("run", "-n", "1", "int.py").returncode == 130
