"""The fast network cards of a host, and whether libfabric can use them.  Standard library only.

A card is what the kernel's RDMA subsystem lists in ``/sys/class/infiniband``; which of libfabric's providers
drives it is by the kernel's driver (libfabric's fi_verbs(7), fi_psm2(7), fi_psm3(7), fi_efa(7)).  Whether it
works is for libfabric to say: it is asked in a process of its own, as its library may hang or crash.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

CARDS = "/sys/class/infiniband"
LONGEST = 1.5
"""Seconds that libfabric has to say what it offers."""

_PROVIDERS = {"efa": "efa", "hfi1": "psm2", "irdma": "psm3"}  # by driver; all others: verbs
_VERSION = (1 << 16) | 10  # of libfabric's interface that we ask by
_RELIABLE_DATAGRAM = 3  # FI_EP_RDM, the kind of endpoint that oneCCL opens
_TAGGED = 1 << 3  # FI_TAGGED, what it wants of it


class Fabric(NamedTuple):
    """A card with an active port, the provider for it, its network interface (empty: it has none), and why
    it can't be used (empty: it can)."""

    device: str
    provider: str
    interface: str
    unusable: str


def find_fabrics(libraries: Iterable[str], cards: str = CARDS) -> tuple[Fabric, ...]:
    """This host's cards, by name.  libfabric is looked for in the directories ``libraries``."""
    found = []
    for device in _listed(cards):
        card = os.path.join(cards, device)
        if _is_active(card):
            provider = _provider(card)
            interface = next(iter(_listed(os.path.join(card, "device", "net"))), "")
            found.append(Fabric(device, provider, interface, why_unusable(provider, libraries, interface)))
    return tuple(found)


def why_unusable(provider: str, libraries: Iterable[str], interface: str = "") -> str:
    """Why the libfabric of one of these directories has no ``provider`` here (for the card with this network
    interface); empty where it has."""
    for directory in libraries:
        library = os.path.join(directory, "libfabric.so.1")
        if os.path.exists(library):
            break
    else:
        return "there is no libfabric"
    env = {
        **os.environ,
        "FI_PROVIDER_PATH": os.environ.get("FI_PROVIDER_PATH", directory),
        "FI_PROVIDER": provider,
    }
    if interface:
        env["FI_VERBS_IFACE"] = interface  # by default verbs takes only those with names in ib…
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__, library],
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return f"libfabric's {provider} doesn't answer"
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        return last if done.returncode == 1 and last else f"libfabric's {provider} crashes"
    return ""


def common_provider(hosts: Mapping[str, tuple[Fabric, ...] | None]) -> tuple[str | None, dict[str, str]]:
    """The provider that works on all hosts (None: TCP is what they share), and a complaint for each host
    with a card that stays unused.

    ``hosts`` has each host's cards; None for one that nobody looked at.
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


def _listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _is_active(card: str) -> bool:
    ports = os.path.join(card, "ports")
    return any("ACTIVE" in _text(os.path.join(ports, port, "state")) for port in _listed(ports))


def _provider(card: str) -> str:
    driver = os.path.basename(os.path.realpath(os.path.join(card, "device", "driver")))
    return _PROVIDERS.get(driver, "verbs")


def _text(file: str) -> str:
    try:
        with open(file, encoding="ascii", errors="replace") as f:
            return f.read()
    except OSError:
        return ""


# ---- in the process of its own


class _Info(ctypes.Structure):
    """The beginning of libfabric's ``struct fi_info``."""


_Info._fields_ = [
    ("next", ctypes.POINTER(_Info)),
    ("caps", ctypes.c_uint64),
    ("mode", ctypes.c_uint64),
    ("address_format", ctypes.c_uint32),
    ("source_length", ctypes.c_size_t),
    ("destination_length", ctypes.c_size_t),
    ("source", ctypes.c_void_p),
    ("destination", ctypes.c_void_p),
    ("handle", ctypes.c_void_p),
    ("sending", ctypes.c_void_p),
    ("receiving", ctypes.c_void_p),
    ("endpoint", ctypes.POINTER(ctypes.c_int)),  # begins with its kind
]


def _ask(library: str) -> str:
    """Why ``library`` offers nothing that oneCCL can use, by the variables of this process."""
    fabric = ctypes.CDLL(library)
    fabric.fi_dupinfo.restype = ctypes.POINTER(_Info)
    fabric.fi_strerror.restype = ctypes.c_char_p
    hints = fabric.fi_dupinfo(None)
    hints.contents.caps = _TAGGED
    hints.contents.mode = (1 << 64) - 1
    hints.contents.endpoint[0] = _RELIABLE_DATAGRAM
    found = ctypes.POINTER(_Info)()
    error = fabric.fi_getinfo(_VERSION, None, None, ctypes.c_uint64(0), hints, ctypes.byref(found))
    return f"libfabric: {fabric.fi_strerror(-error).decode()}" if error else ""


if __name__ == "__main__":
    sys.exit(_ask(sys.argv[1]) or 0)
