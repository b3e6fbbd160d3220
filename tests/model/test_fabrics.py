"""The provider of libfabric that all hosts of a job can use."""

from __future__ import annotations

import pytest
from support.plans import BROKEN, NO_DATA, VERBS

from cpulaunch.model.fabrics import Fabric, common_provider

PSM3 = Fabric("irdma0", "psm3", "ens1", "")


@pytest.mark.parametrize(
    ("hosts", "provider", "reasons"),
    [
        ({"a": (VERBS,), "b": (VERBS,)}, "verbs", {}),
        ({"a": (PSM3, VERBS), "b": (VERBS,)}, "verbs", {}),
        ({"a": (), "b": ()}, None, {}),
        ({}, None, {}),
        ({"a": (VERBS,), "b": ()}, None, {"a": "b has none that works"}),
        ({"a": (VERBS,), "b": None}, None, {"a": "b has none that works"}),
        ({"a": (VERBS,), "b": (PSM3,)}, None, {"a": "other hosts have other kinds", "b": "other hosts have other kinds"}),
        ({"a": (BROKEN,), "b": (BROKEN,)}, None, {"a": NO_DATA, "b": NO_DATA}),
    ],
)  # fmt: skip
def test_all_hosts_must_have_the_provider(hosts, provider: str | None, reasons: dict[str, str]) -> None:
    found, messages = common_provider(hosts)
    assert (found, sorted(messages)) == (provider, sorted(reasons))
    for host, why in reasons.items():
        card = hosts[host][0]
        assert messages[host] == f"its {card.device} ({card.provider}) stays unused, TCP is taken: {why}"
