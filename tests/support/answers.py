"""Answers of hosts to a probe."""

from __future__ import annotations

from typing import Any

from cpulaunch.discovery.probe.messages import ProbeAnswer

LO = ["lo", "127.0.0.1", 8]


DOCKER = ["docker0", "172.17.0.1", 16]


def answer(number: int, *, interface: str = "eth0", here: bool = False, **changes: Any) -> ProbeAnswer:
    """The answer of host number ``number`` of a sound cluster."""
    sound: dict[str, Any] = {
        "name": f"node{number}",
        "time": 1000.5,
        "versions": {
            "Python": "3.12.1",
            "cpulaunch": "0.1.0",
            "torch": "2.13.0",
            "intel_extension_for_pytorch": None,
        },
        "digests": {},
        "directory": True,
        "missing": [],
        "shm": 1 << 33,
        "reached_at": None if here else f"10.0.0.{number + 1}",
        "reached_from": None if here else "10.0.0.1",
        "interfaces": [LO, DOCKER, [interface, f"10.0.0.{number + 1}", 24]],
        "master": ["10.0.0.1"],
        "source": f"10.0.0.{number + 1}",
        "facts": {
            "topology": {"cpus": [[n, n, 0, 0] for n in range(4)]},
            "cpu_flags": ["amx_bf16"],
            "memory": 1 << 36,
        },
        "facts_error": None,
        "listening": None,
        "listen_error": None,
    }
    return ProbeAnswer(**{**sound, **changes})
