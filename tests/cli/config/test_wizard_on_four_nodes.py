"""What the wizard writes on the login host of a cluster of four runs there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.conftest import HOSTS, cluster, cpulaunch, the_cluster
from support.faults import Cluster
from support.terminal import ENTER, UP, Terminal, question_of

__all__ = ["cluster", "cpulaunch", "the_cluster"]  # fixtures
pytestmark = pytest.mark.slow


def test_four_hosts_are_typed_in_checked_and_run(
    wizard: Callable[..., Terminal], cluster: Cluster, cpulaunch: Callable[..., object], tmp_path: Path
) -> None:
    terminal = wizard("--set", "training.backend=gloo", on=cluster)
    terminal.answers(question_of("hosts.hostfile"), UP)
    terminal.answers("Which hosts?", " ".join(HOSTS))
    terminal.answers("Which hostfile should they be written to?")
    terminal.answers(question_of("mpi.flavour"))
    terminal.answers(question_of("ccl.interface"))
    terminal.answers(question_of("hosts.nproc_per_node"), "1")
    for key in ("training.precision", "training.engine", "output.log_dir"):
        terminal.answers(question_of(key))
    terminal.sees("4 ranks on 4 hosts (node[0-3])")
    terminal.sees("What next?")
    terminal.types(ENTER)
    terminal.sees("cpulaunch hosts check -f hostfile")
    assert terminal.ends() == 0
    (tmp_path / "train.py").write_text("import os, socket\nprint(os.environ['RANK'], socket.gethostname())\n")
    done = cpulaunch("run", "--tee", "all", "train.py", on="login")
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[-2:] for line in done.stdout.splitlines()) == [
        [str(n), HOSTS[n]] for n in range(4)
    ]
