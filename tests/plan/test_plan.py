"""The plan as a value: its JSON round trip."""

from __future__ import annotations

import json

import pytest
from support.plans import make

from cpulaunch.errors import ConfigError
from cpulaunch.model.network import Interface
from cpulaunch.plan.plan import Plan


def test_a_plan_survives_json() -> None:
    made = make(
        "hosts.nproc_per_node=4",
        "env=A=b",
        "mpi.args=-v",
        hosts="a,b:2",
        environ={"I_MPI_HYDRA_IFACE": "x"},
        egress_interface=Interface("eno1", "10.0.0.9", 24),
    )
    text = json.dumps(made.to_json())
    assert Plan.from_json(json.loads(text)) == made
    assert json.dumps(Plan.from_json(json.loads(text)).to_json()) == text


def test_a_plan_of_another_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a plan of schema 1: 2"):
        Plan.from_json({**make().to_json(), "schema": 2})
