"""Progress and errors that the user sees while very many hosts are probed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from queue import SimpleQueue

import pexpect
import pytest
from support.command import TIMEOUT, Run, clean_environment
from support.jobs import run_changed

from cpulaunch.cli.progress import AskingProgress
from cpulaunch.discovery.probe.probe import ProbeProgress

CHECK = ("hosts", "check", "--hosts", "lost[1-12],slow[1-28]")
SSH = """#!/bin/sh
for word; do
  case $word in
    lost*) echo "ssh: Could not resolve hostname $word: Name or service not known" >&2; exit 255 ;;
    slow*) until test -e "$GO"; do sleep 0.02; done
           echo "$word: Permission denied (publickey)." >&2; exit 255 ;;
  esac
done
"""


@pytest.fixture
def played_ssh(tmp_path: Path) -> dict[str, str]:
    """A fake ssh.  It can't resolve hosts lost…, and waits for a file ``go`` for hosts called slow…."""
    (tmp_path / "bin").mkdir()
    (ssh := tmp_path / "bin/ssh").write_text(SSH)
    ssh.chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "GO": str(tmp_path / "go"), "LC_ALL": "C.UTF-8"}


def test_a_terminal_shows_how_many_have_answered(tmp_path: Path, played_ssh: dict[str, str]) -> None:
    terminal = pexpect.spawn(
        sys.executable, ["-m", "cpulaunch", *CHECK], cwd=str(tmp_path), timeout=TIMEOUT, encoding="utf-8",
        env=clean_environment(**played_ssh, TERM="xterm"), dimensions=(24, 80),
    )  # fmt: skip
    terminal.expect("cpulaunch: asking hosts: 0 of 40 answered, 12 failed")
    (tmp_path / "go").touch()
    terminal.expect("host  ")
    assert re.search(r"\r\x1b\[K *$", terminal.before)  # the progress is erased before the table
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert "asking hosts" not in terminal.before
    assert terminal.exitstatus == 3


def test_other_work_is_done_once_while_hosts_are_probed() -> None:
    done: SimpleQueue[bool] = SimpleQueue()
    progress = AskingProgress(lambda: done.put(True))
    assert done.empty()
    progress(ProbeProgress(4, 0, 0))
    assert done.get(timeout=TIMEOUT)
    progress(ProbeProgress(4, 1, 0))
    progress(None)
    assert done.empty()


def test_without_a_terminal_a_status_line_is_printed_from_time_to_time(
    tmp_path: Path, played_ssh: dict[str, str]
) -> None:
    code = (
        "import os, sys; from cpulaunch.cli import main, progress\n"
        "progress.FIRST_LINE = 0.5\n"
        "show = progress.AskingProgress.__call__\n"
        "def shown(self, asked):\n"
        "    show(self, asked)\n"
        "    asked and asked.failed == 12 and open(os.environ['GO'], 'w').close()\n"
        "progress.AskingProgress.__call__ = shown\n"
        "main.entry()"
    )
    done = run_changed(code, *CHECK, directory=tmp_path, env=played_ssh)
    assert done.returncode == 3
    lines = [line for line in done.stderr.splitlines() if "asking hosts" in line]
    assert lines[0] == "cpulaunch: asking hosts: 0 of 40 answered, 12 failed"
    assert "\x1b" not in done.stderr


def test_a_problem_shared_by_many_hosts_is_reported_once(
    cpulaunch: Run, tmp_path: Path, played_ssh: dict[str, str]
) -> None:
    (tmp_path / "go").touch()
    done = cpulaunch(*CHECK, env=played_ssh)
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "cpulaunch: ✗ lost[1-12]: ssh: Could not resolve hostname lost1: Name or service not known",
        "cpulaunch:     is the name right?  Names come from /etc/hosts, DNS or ~/.ssh/config",
        "cpulaunch: ✗ slow[1-28]: ssh: slow1: Permission denied (publickey).",
        "cpulaunch:     ssh must not need a password: ssh-copy-id slow1",
    ]


def test_a_problem_shared_by_two_hosts_is_reported_for_each(
    cpulaunch: Run, played_ssh: dict[str, str]
) -> None:
    done = cpulaunch("hosts", "check", "--hosts", "lost1,lost2", env=played_ssh)
    assert done.stderr.count("✗ lost1: ") == done.stderr.count("✗ lost2: ") == 1
