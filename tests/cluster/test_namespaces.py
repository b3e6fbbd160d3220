"""``scripts/play_cluster.sh``, with which users start the test cluster."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import REPOSITORY, bounded

from cluster.conftest import need_cluster

pytestmark = pytest.mark.slow


def test_the_script_starts_a_cluster(tmp_path: Path) -> None:
    need_cluster()
    script = REPOSITORY / "scripts" / "play_cluster.sh"
    shell = 'cluster node1 hostname; cluster ps; cat "$HOSTFILE"; cluster login ssh node0 pwd'
    argv = [script, "--hosts", "2", "sh", "-c", shell]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.stdout.split() == ["node1", "node0", "node1", pwd.getpwuid(0).pw_dir], done.stderr


def test_ctrl_c_reaches_the_command_on_the_host(tmp_path: Path) -> None:
    need_cluster()
    script = REPOSITORY / "scripts" / "play_cluster.sh"
    there = "trap 'echo ended by itself; exit 7' INT; echo up; while :; do sleep 0.1; done"
    shell = f'trap : INT; cluster node0 bash -c "{there}"; echo "code $?"; cluster login cluster ps'
    started = subprocess.Popen(
        [script, "--hosts", "1", "bash", "-c", shell],
        env={**os.environ, "PYTHON": sys.executable},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # like a foreground job of a terminal: all its processes get Ctrl-C
    )
    with bounded(started) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate()
    assert out.splitlines() == ["ended by itself", "code 7"], err
    assert "you are on the host login" in err
    assert "Traceback" not in err
