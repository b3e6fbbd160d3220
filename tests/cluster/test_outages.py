"""Network outages: a host is lost if its outage is longer than ``--heartbeat-timeout``."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import outages
from support.command import launcher_options
from support.faults import Cluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("launcher", "backend", "host"), [("ssh", "ccl", "node0"), ("openmpi", "gloo", "node1")]
)
def test_a_shorter_outage_only_delays_a_job(
    launcher: str, backend: str, host: str, cluster: Cluster, tmp_path: Path
) -> None:
    """This includes an outage of rank 0's host, which has the store.  No data is lost or repeated.

    By default, kernels retransmit data 6.2 s and 12.6 s after the cut.
    """
    options = launcher_options(launcher)
    result = outages.run(cluster, tmp_path, backend, options, outage=6, timeout=9, host=host)
    assert result.exit_code == 0, result.stderr
    assert result.pause is not None
    assert result.pause > 5
    assert result.logged == result.printed
    assert result.connected_again


def test_a_longer_outage_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    options = launcher_options("intel")
    result = outages.run(cluster, tmp_path, "ccl", options, outage=30, timeout=3)
    assert result.exit_code == 4, result.stderr
    assert "host node1 was lost" in result.stderr
