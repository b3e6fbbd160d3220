"""Plans for machines other than this one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpulaunch.config.load import load
from cpulaunch.discovery.host.lscpu import topology_from_lscpu
from cpulaunch.model.fabrics import Fabric
from cpulaunch.model.facts import Facts, HostFacts, Mpi
from cpulaunch.model.hosts import parse_hosts
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.plan import Plan, Program

BIG = HostFacts(
    topology_from_lscpu((Path(__file__).parent.parent / "plan" / "2x28.lscpu").read_text()),
    cpu_flags=("amx_bf16",),
)


SMALL = HostFacts(topology_from_lscpu("# CPU,Core,Socket,Node\n0,0,0,0\n1,1,0,0\n"), cpu_flags=())


NO_DATA = "libfabric: No data available"
VERBS = Fabric("mlx5_0", "verbs", "ib0", "")
BROKEN = VERBS._replace(unusable=NO_DATA)
"""Network cards: one that works, and one that libfabric can't use."""

INTEL, MPICH = Mpi("intel", "/i/mpiexec.hydra", "2021.18"), Mpi("mpich", "/m/mpiexec", "5.0.2")
PROGRAM = Program(("/usr/bin/python", "train.py"), True, "/home/me", "/usr/bin/python")


def make(
    *settings: str, hosts: str = "", facts: HostFacts = BIG, environ: dict[str, str] | None = None, **more
) -> Plan:
    """Return the plan for ``key=value`` settings and a list of hosts, which all look like ``facts``."""
    given = [(*setting.split("=", 1), "--" + setting.split("=")[0]) for setting in settings]
    config = load(given, environ={"HOME": "/nowhere", **(environ or {})})
    listed = parse_hosts(hosts, "--hosts") if hosts else ()
    known = {
        "here": frozenset({"localhost", "head"}),
        "mpis": (INTEL,),
        "hosts": more.pop("hosts_known", {}),
        **more,
    }
    return make_plan(config, Facts(like=facts, listed=listed, **known), PROGRAM)


def setting(plan: Plan, key: str) -> tuple[Any, str]:
    """The value that the plan shows for a setting, and its origin."""
    (row,) = [row for row in plan.setting_rows() if row.key == key]
    return row.value, str(row.origin)


def thousand_different_hosts(last: HostFacts | None = None) -> Plan:
    """The plan for 1,024 hosts that lack different CPUs.

    The ``last`` one, of a different kind, has one rank.
    """
    chance = random.Random(0)
    cpus = BIG.topology.cpus
    names = [f"node{number:04d}" for number in range(1, 1025)]
    known = {
        name: replace(
            BIG,
            topology=replace(
                BIG.topology, cpus=tuple(cpus[n] for n in sorted(chance.sample(range(len(cpus)), 80)))
            ),
        )
        for name in names
    }
    slots = dict.fromkeys(names, 8)
    if last:
        known[names[-1]], slots[names[-1]] = last, 1
    return make(hosts=",".join(f"{name}:{slots[name]}" for name in names), hosts_known=known)
