"""Fast network cards, and the libfabric provider that all hosts of a job can use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Fabric(NamedTuple):
    """A card with an active port.

    ``device`` is its name in the kernel's RDMA subsystem, ``provider`` its libfabric provider, ``interface``
    its network interface (empty: none).  ``unusable`` is why it can't be used (empty: it can).
    """

    device: str
    provider: str
    interface: str
    unusable: str


def common_provider(hosts: Mapping[str, tuple[Fabric, ...] | None]) -> tuple[str | None, dict[str, str]]:
    """Return the provider that works on all hosts, and a complaint for each host with an unused card.

    The provider is None if the hosts share only TCP.  ``hosts`` has each host's cards; None if they are
    unknown.
    """
    usable = {
        host: [card.provider for card in cards or () if not card.unusable] for host, cards in hosts.items()
    }
    anywhere = (provider for providers in usable.values() for provider in providers)
    shared = next((p for p in anywhere if all(p in providers for providers in usable.values())), None)
    if shared:
        return shared, {}
    without = [host for host, providers in usable.items() if not providers]
    complaints = {}
    for host, cards in hosts.items():
        if cards:
            card = next((card for card in cards if not card.unusable), cards[0])
            why = card.unusable or (
                f"{without[0]} has none that works" if without else "other hosts have other kinds"
            )
            complaints[host] = f"its {card.device} ({card.provider}) stays unused, TCP is taken: {why}"
    return None, complaints
