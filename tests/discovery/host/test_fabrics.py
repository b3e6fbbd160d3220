"""Fast network cards in made-up sysfs trees, checked with the real libfabric."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cpulaunch.discovery.host import fabrics
from cpulaunch.discovery.host.fabrics import find_fabrics, why_unusable

LIBRARIES = [str(Path(sys.prefix, "lib"))]
NOTHING = "libfabric: No data available"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer timeout, because Python may start slowly on a busy machine."""
    monkeypatch.setattr(fabrics, "TIMEOUT", 60.0)


@pytest.fixture
def card(tmp_path: Path) -> Callable[..., str]:
    """A function that adds a card to the sysfs tree and returns the tree's path."""

    def add(name: str, driver: str, state: str = "4: ACTIVE", interface: str = "") -> str:
        device = tmp_path / "cards" / name
        (device / "ports" / "1").mkdir(parents=True)
        (device / "ports" / "1" / "state").write_text(state + "\n")
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "device").mkdir()
        (device / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
        if interface:
            (device / "device" / "net" / interface).mkdir(parents=True)
        return str(device.parent)

    return add


@pytest.mark.parametrize(
    ("driver", "interface", "provider"),
    [
        ("mlx5_core", "ib0", "verbs"),
        ("bnxt_re", "ens3", "verbs"),
        ("irdma", "ens1", "psm3"),
        ("hfi1", "ib0", "psm2"),
        ("efa", "", "efa"),
    ],
)
def test_a_card_has_the_provider_of_its_driver(card, driver: str, interface: str, provider: str) -> None:
    """libfabric doesn't find the made-up hardware, but psm3 accepts any active Ethernet interface."""
    (found,) = find_fabrics(LIBRARIES, card("card0", driver, interface=interface))
    assert found[:3] == ("card0", provider, interface)
    assert found.unusable == NOTHING or (provider == "psm3" and found.unusable == "")


def test_a_card_without_a_link_is_left_out(card) -> None:
    assert find_fabrics(LIBRARIES, card("mlx5_0", "mlx5_core", state="1: DOWN")) == ()
    assert find_fabrics(LIBRARIES, "/nowhere") == ()


def test_libfabric_says_why_a_provider_is_unusable() -> None:
    assert why_unusable("tcp", LIBRARIES) == ""
    assert why_unusable("verbs", LIBRARIES, "ib0") == NOTHING
    assert why_unusable("tcp", ["/nowhere"]) == "there is no libfabric"


def test_a_file_that_is_not_libfabric_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "libfabric.so.1").write_text("no library")
    assert "libfabric.so.1" in why_unusable("tcp", [str(tmp_path)])
