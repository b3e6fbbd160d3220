"""Find a host's fast network cards, and whether libfabric can use them.  Standard library only.

The cards are the devices of the kernel's RDMA subsystem in ``/sys/class/infiniband``.  The kernel's driver
determines which provider of libfabric uses a card (fi_verbs(7), fi_psm2(7), fi_psm3(7), fi_efa(7)).
`ask_libfabric` then checks that the provider works.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

from cpulaunch.discovery.host.files import read_file
from cpulaunch.model.fabrics import Fabric

CARDS = "/sys/class/infiniband"
TIMEOUT = 1.5
"""Seconds within which libfabric must answer."""

_ASK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ask_libfabric.py")
_PROVIDERS = {"efa": "efa", "hfi1": "psm2", "irdma": "psm3"}  # driver → provider; all others use verbs


def find_fabrics(libraries: Iterable[str], cards: str = CARDS) -> tuple[Fabric, ...]:
    """Find this host's active cards, in order of names.  ``libraries`` are directories with libfabric."""
    found = []
    for device in _list(cards):
        card = os.path.join(cards, device)
        if _is_active(card):
            provider = _provider(card)
            interface = next(iter(_list(os.path.join(card, "device", "net"))), "")
            found.append(Fabric(device, provider, interface, why_unusable(provider, libraries, interface)))
    return tuple(found)


def why_unusable(provider: str, libraries: Iterable[str], interface: str = "") -> str:
    """Why the first libfabric in the directories ``libraries`` can't use ``provider``; empty if it can.

    ``interface`` is the card's network interface, if it has one.
    """
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
        env["FI_VERBS_IFACE"] = interface  # by default, verbs uses only interfaces named ib…
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", _ASK, library],
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"libfabric's {provider} doesn't answer"
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        return last if done.returncode == 1 and last else f"libfabric's {provider} crashes"
    return ""


def _list(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _is_active(card: str) -> bool:
    ports = os.path.join(card, "ports")
    return any("ACTIVE" in (read_file(os.path.join(ports, port, "state")) or "") for port in _list(ports))


def _provider(card: str) -> str:
    driver = os.path.basename(os.path.realpath(os.path.join(card, "device", "driver")))
    return _PROVIDERS.get(driver, "verbs")
