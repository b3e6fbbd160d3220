"""What befalls jobs on four hosts: each event by one launcher here, by all of them in scripts/chaos.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import chaos
from support.command import launcher_options
from support.faults import Cluster
from support.marks import repeat

pytestmark = pytest.mark.slow


# The launchers differ most in these.
EACH = ("raises while the others sleep", "Python missing, no preflight", "Ctrl-C")
# Where ssh is the launcher, its own processes matter in these.
BY_SSH = (
    "link cut",
    "host switched off",
    "ssh connection lost",
    "packets dropped at start, no preflight",
    "SIGTERM",
    "launcher killed",
)
# Each is like another one: computing like sleeping, to be killed by one signal like by another.
REPEATS = ("raises while the others compute", "is killed while the others wait (gloo)", "aborts", "SIGHUP")
CASES = [
    (name, launcher)
    for number, name in enumerate(chaos.EVENTS)
    for launcher in chaos.EVENTS[name].launchers
    if name in EACH
    or (launcher == "ssh" and name in BY_SSH)
    or launcher == chaos.LAUNCHERS[number % len(chaos.LAUNCHERS)]
]


@pytest.mark.parametrize(
    ("name", "launcher"),
    [repeat(*case) if case[0] in REPEATS else case for case in CASES],
    ids=[f"{name}-{launcher}" for name, launcher in CASES],
)
def test_what_befalls_a_job_is_named_and_leaves_nothing(
    name: str, launcher: str, cluster: Cluster, tmp_path: Path
) -> None:
    rank, event = CASES.index((name, launcher)) % 4, chaos.EVENTS[name]
    with chaos.hosts_for(cluster, event) as hosts:
        result = chaos.run(hosts, tmp_path, launcher_options(launcher), name, rank)
    assert not chaos.problems(event, rank, result), result.stderr
