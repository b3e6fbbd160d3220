"""Fast network cards, and the libfabric provider that all hosts of a job can use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Fabric(NamedTuple):
    """A network card with an active port.

    ``device`` is its name in the kernel's RDMA subsystem, and ``provider`` its libfabric provider.
    ``interface`` is its network interface, or empty.  ``unusable`` is the reason why the card can't be used,
    or empty.
    """

    device: str
    provider: str
    interface: str
    unusable: str


def common_provider(hosts: Mapping[str, tuple[Fabric, ...] | None]) -> tuple[str | None, dict[str, str]]:
    """Return the provider that works on all hosts, and a message for each host whose card stays unused.

    ``hosts`` maps each host to its cards, or to None if they are unknown.  The provider is None if no card's
    provider works on all hosts; the job then uses TCP.
    """
    usable = {
        host: [card.provider for card in cards or () if not card.unusable] for host, cards in hosts.items()
    }
    candidates = (provider for providers in usable.values() for provider in providers)
    shared = next((p for p in candidates if all(p in providers for providers in usable.values())), None)
    if shared:
        return shared, {}
    without = [host for host, providers in usable.items() if not providers]
    messages = {}
    for host, cards in hosts.items():
        if cards:
            card = next((card for card in cards if not card.unusable), cards[0])
            why = card.unusable or (
                f"{without[0]} has none that works" if without else "other hosts have other kinds"
            )
            messages[host] = f"its {card.device} ({card.provider}) stays unused, TCP is taken: {why}"
    return None, messages
