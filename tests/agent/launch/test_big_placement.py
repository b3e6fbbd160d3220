"""A plan that is too long for one environment variable still reaches the agents."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

from support.agents import FIRST_CPU, run_agent
from support.command import Run
from support.marks import usually_under
from support.plans import thousand_different_hosts

from cpulaunch.discovery.host.lscpu import topology_from_lscpu
from cpulaunch.launchers import load_mpi
from cpulaunch.launchers.command import Installation
from cpulaunch.model.facts import HostFacts
from cpulaunch.plan.placement import Placement


def test_the_agent_on_the_last_of_a_thousand_different_hosts_starts_its_program(tmp_path: Path) -> None:
    """execve would fail if one of the variables were too long."""
    here = HostFacts(topology_from_lscpu(f"# CPU,Core,Socket,Node\n{FIRST_CPU},0,0,0\n"), cpu_flags=())
    plan = thousand_different_hosts(here)
    (command,) = load_mpi("intel").commands(plan, Installation("/agent.py", "/ssh.sh", "/spawner.py"))
    placement = Placement.from_variables(command.env)._replace(directory=str(tmp_path))
    assert len(placement.to_variables()) > 1
    last = plan.world_size - 1
    identity = dict(zip(placement.identity, map(str, (last, plan.world_size, 0, 1)), strict=True))
    program = "import os; print(os.environ['RANK'], os.environ['GROUP_RANK'], os.sched_getaffinity(0))"
    done = run_agent(placement, program, {**identity, "MASTER_ADDR": "127.0.0.1"})
    assert done.stdout.split()[1:] == [str(last), "1023", f"{{{FIRST_CPU}}}"], done.stderr


@usually_under("local")
def test_a_plan_in_several_variables_passes_each_launcher(
    cpulaunch: Run, launcher_options: list[str], tmp_path: Path
) -> None:
    """The variables of the plan don't reach the program."""
    noise = {f"NOISE{number}": random.Random(number).randbytes(40_000).hex() for number in range(5)}
    (tmp_path / "digest.py").write_text(
        "import hashlib, json, os\n"
        "left = [name for name in os.environ if name.startswith('CPULAUNCH_PLACEMENT')]\n"
        "noise = ''.join(os.environ[f'NOISE{number}'] for number in range(5))\n"
        "print(json.dumps([left, hashlib.sha256(noise.encode()).hexdigest()]))\n"
    )
    options = [f"--env={name}={value}" for name, value in noise.items()]
    done = cpulaunch("run", "-n", "2", "--tee", "0", *launcher_options, *options, "digest.py")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], hashlib.sha256("".join(noise.values()).encode()).hexdigest()]
