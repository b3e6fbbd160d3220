"""Faults injected into jobs on four hosts, each with one launcher, or all under ``scripts/test.sh --all``."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import chaos
from support.command import launcher_options
from support.faults import Cluster
from support.marks import repeat

pytestmark = pytest.mark.slow


# The launchers to test with each event by default.  Events that resemble others, or that tests/hangs tests,
# are missing.  Ctrl-C has two launchers because they differ most there.
USUAL = {
    "raises while the others wait (gloo)": ("openmpi",),
    "exits with 5": ("mpich",),
    "is killed while the others wait (ccl)": ("intel",),
    "loses its agent": ("ssh",),
    "all raise at once": ("intel",),
    "link cut": ("mpich",),
    "packets dropped at start, no preflight": ("ssh",),
    "Python missing, no preflight": ("openmpi",),
    "Ctrl-C": ("openmpi", "ssh"),
    "SIGTERM": ("ssh",),
    "launcher killed": ("openmpi",),
    "host switched off": ("ssh",),
    "ssh connection lost": ("ssh",),
}
CASES = [(name, launcher) for name in chaos.EVENTS for launcher in chaos.EVENTS[name].launchers]


@pytest.mark.parametrize(
    ("name", "launcher"),
    [case if case[1] in USUAL.get(case[0], ()) else repeat(*case) for case in CASES],
    ids=[f"{name}-{launcher}" for name, launcher in CASES],
)
def test_a_fault_is_reported_and_leaves_no_process(
    name: str, launcher: str, cluster: Cluster, tmp_path: Path
) -> None:
    rank, event = CASES.index((name, launcher)) % 4, chaos.EVENTS[name]
    with chaos.hosts_for(cluster, event) as hosts:
        result = chaos.run(hosts, tmp_path, launcher_options(launcher), name, rank)
    assert not chaos.problems(event, rank, result), result.stderr
