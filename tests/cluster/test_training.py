"""Training on several hosts with gradients that are sent between the hosts in bf16."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.command import REPOSITORY

from cluster.conftest import Run
from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

TRAIN = (REPOSITORY / "tests" / "runtime" / "programs.py", "train", "mlp", 20, 24)
BF16_LOSS = 0.02
"""Maximum difference of a loss of about 1.6 from fp32's in the first 20 steps, as bf16 has 8 bits."""


@pytest.fixture
def trained(cpulaunch: Run) -> Any:
    """Train on three ranks on two hosts; return the losses, and the digest of all weights."""

    def train(*options: str) -> tuple[list[float], str]:
        placed = ["--hosts", "node0:2,node1:1", "--threads", 1, "--oversubscribe", "--tee", "all"]
        done = cpulaunch("run", *placed, "--precision", "fp32", *options, *TRAIN, timeout=120)
        assert done.returncode == 0, done.stderr
        ranks = [json.loads(text) for text in re.findall(r"RESULT (\{.*\})", done.stdout)]
        assert len(ranks) == 3
        (digest,) = {rank["digest"] for rank in ranks}
        return ranks[0]["losses"], digest

    return train


def test_compressed_gradients_train_equally_well_with_equal_weights_on_all_ranks(trained) -> None:
    exact_losses, exact = trained("--backend", "ccl")
    losses, digest = trained("--backend", "ccl", "--compress-gradients", "bf16")
    assert losses == pytest.approx(exact_losses, abs=BF16_LOSS)
    assert digest != exact
