"""Every setting takes effect, in a plan's environment or ranks, or in another place that the tables name.

A test fails if a setting is missing from these tables or changes nothing.
"""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.command import Run
from support.machines import machine

from cpulaunch import launchers
from cpulaunch.config.config import Config
from cpulaunch.config.kinds import Every
from cpulaunch.config.load import load
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.settings import SETTINGS
from cpulaunch.config.values import Interval, PortRange
from cpulaunch.config.write import yaml_text
from cpulaunch.discovery.collect import Ccl, collect_facts, listed_hosts
from cpulaunch.errors import CpulaunchError
from cpulaunch.launchers.command import Installation
from cpulaunch.model.facts import Facts, HostFacts, Mpi
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.placement import Placement
from cpulaunch.plan.plan import Plan, Program
from cpulaunch.supervise.attempts.attempt import Attempt
from cpulaunch.supervise.attempts.loop import settings_of
from cpulaunch.supervise.attempts.next_attempt import restart_rules
from cpulaunch.supervise.profiling.request import profiled_steps
from cpulaunch.supervise.stalls.progress import stall_settings

PROGRAM = Program(("/venv/bin/python", "/home/me/train.py"), True, "/", "/venv/bin/python")
LIBRARIES = {"tcmalloc": "/t.so", "jemalloc": "/j.so", "intel": "/i.so", "torch": "/libgomp.so"}
ENVIRON = {"HOME": "/nowhere", "SECRET": "s"}


def planned(config: Config, machine_name: str = "xeon-2x28") -> Plan:
    """The plan for the hosts that ``config`` names, or for this machine; all are like the named machine."""
    facts = Facts(
        like=HostFacts(machine(machine_name), libraries=LIBRARIES),
        listed=listed_hosts(config, print),
        here=frozenset({"localhost"}),
        mpis=tuple(Mpi(name, f"/mpi/{name}", "1") for name in launchers.MPIS),
    )
    return make_plan(config, facts, PROGRAM)


def shared_env(name: str) -> Callable[[Config], Any]:
    return lambda config: planned(config).env.get(name)


def first_host_env(name: str) -> Callable[[Config], Any]:
    return lambda config: planned(config).hosts[0].env.get(name)


def first_rank(name: str, machine_name: str = "xeon-2x28") -> Callable[[Config], str]:
    return lambda config: str(getattr(planned(config, machine_name).hosts[0].ranks[0], name))


def placement(name: str) -> Callable[[Config], Any]:
    """Return a function that reads the attribute ``name`` of the plan that the agents get."""

    def seen(config: Config) -> Any:
        plan = planned(config)
        (command, *_) = launchers.load(plan.launcher).commands(
            plan, Installation("/agent.py", "/ssh.sh", "/spawner.py")
        )
        return getattr(Placement.from_variables(command.env), name)

    return seen


def arguments(config: Config) -> tuple[str, ...]:
    plan = planned(config)
    return (
        launchers.load(plan.launcher)
        .commands(plan, Installation("/agent.py", "/ssh.sh", "/spawner.py"))[0]
        .argv
    )


def goes_on(config: Config) -> bool:
    """Whether the other instances go on if one fails."""
    plan = planned(config)
    attempt = Attempt(plan, (), "", "", 0)
    return settings_of(attempt, launchers.load(plan.launcher)).go_on


def collected(config: Config) -> Facts:
    return collect_facts(config, Ccl(lambda: None, lambda: ()), print, print, PROGRAM)


@dataclass(frozen=True)
class Effect:
    """``seen`` returns ``expected`` if the setting has the value ``text``, and something else by default.

    ``given`` has other settings, without which this setting has no effect.
    """

    text: str
    seen: Callable[[Config], Any]
    expected: Any
    given: Mapping[str, str] = field(default_factory=dict)


HOSTS = {"hosts.list": "a,b,c"}
FEW_CORES = {"cpu.cores_per_rank": "4"}

EFFECTS = {
    "launcher": Effect("mpirun", lambda config: planned(config).launcher, "intel"),
    "hosts.hostfile": Effect("nodes", lambda config: [h.host for h in planned(config).hosts], ["x", "y"]),
    "hosts.list": Effect("u,v", lambda config: [h.host for h in planned(config).hosts], ["u", "v"]),
    "hosts.exclude": Effect("b", lambda config: [h.host for h in planned(config).hosts], ["a", "c"], HOSTS),
    "hosts.nnodes": Effect("2", lambda config: len(planned(config).hosts), 2, HOSTS),
    "hosts.nproc_per_node": Effect("4", lambda config: planned(config).world_size, 12, HOSTS),
    "hosts.nproc": Effect("9", lambda config: planned(config).world_size, 9, HOSTS),
    "hosts.master_addr": Effect("10.9.8.7", shared_env("MASTER_ADDR"), "10.9.8.7"),
    "hosts.oversubscribe": Effect("true", shared_env("CCL_YIELD"), "sched_yield", {"hosts.nproc": "57"}),
    "hosts.skip_preflight": Effect(
        "true", lambda config: len(collected(config).listed), 1, {"hosts.list": "nowhere.invalid"}
    ),
    "instances.count": Effect("8", lambda config: planned(config).world_size, 8),
    "instances.cores_per_instance": Effect("4", lambda config: planned(config).world_size, 14),
    "instances.only": Effect("1", first_rank("cores"), "28-55", {"instances.count": "auto"}),
    "instances.fail_fast": Effect("true", goes_on, False, {"instances.count": "2"}),
    "mpi.flavour": Effect("mpich", lambda config: planned(config).mpiexec, "/mpi/mpich", HOSTS),
    "mpi.path": Effect("their-mpi", lambda config: [mpi.flavour for mpi in collected(config).mpis or ()], ["openmpi"]),
    "mpi.args": Effect("-theirs", lambda config: "-theirs" in arguments(config), True, HOSTS),
    "ccl.worker_count": Effect("2", shared_env("CCL_WORKER_COUNT"), "2"),
    "ccl.transport": Effect("mpi", shared_env("CCL_ATL_TRANSPORT"), "mpi", {"mpi.flavour": "intel"}),
    "ccl.provider": Effect("psm3", shared_env("FI_PROVIDER"), "psm3"),
    "ccl.interface": Effect("ib0", shared_env("GLOO_SOCKET_IFNAME"), "ib0"),
    "ccl.logical_cores": Effect("true", first_rank("comm_cores"), "56"),
    "cpu.cores_per_rank": Effect("4", first_rank("cores"), "0-3"),
    "cpu.cores": Effect("8-19", first_rank("cores"), "8-19"),
    "cpu.numa_nodes": Effect("1", first_rank("numa_nodes"), "1"),
    "cpu.bind_numa": Effect("true", first_rank("memory_policy"), "bind:0"),
    "cpu.logical_cores": Effect("true", first_rank("cores"), "0-27,56-83"),
    "cpu.e_cores": Effect("true", first_rank("threads", "i9-8p-8e"), "16"),
    "cpu.strategy": Effect("close", lambda config: str(planned(config).hosts[0].ranks[1].numa_nodes), "0", FEW_CORES),
    "cpu.threads": Effect("5", shared_env("OMP_NUM_THREADS"), "5"),
    "cpu.lenient": Effect("true", placement("lenient"), True),
    "cpu.allocator": Effect("jemalloc", first_host_env("LD_PRELOAD"), "/j.so"),
    "cpu.openmp": Effect("intel", first_host_env("LD_PRELOAD"), "/t.so:/i.so"),
    "watch.heartbeat_timeout": Effect("7", placement("heartbeat_timeout"), 7),
    "watch.grace_period": Effect("3", placement("grace_period"), 3),
    "watch.stall_timeout": Effect("90", lambda config: stall_settings(planned(config)).timeout, 90),
    "watch.stall_action": Effect("abort", lambda config: stall_settings(planned(config)).action, "abort"),
    "watch.max_restarts": Effect("3", lambda config: restart_rules(planned(config)).max_restarts, 3),
    "watch.restart_on": Effect("error", lambda config: restart_rules(planned(config)).on, "error"),
    "watch.restartable": Effect("true", lambda config: planned(config).settings.watch.restartable, True),
    "watch.profile": Effect("10-14", lambda config: profiled_steps(planned(config)), (10, 14)),
    "watch.restart_always": Effect("true", lambda config: restart_rules(planned(config)).always, True),
    "output.stdin": Effect("1", placement("stdin"), 1, {"hosts.nproc": "2"}),
    "env": Effect("THEIRS=1", shared_env("THEIRS"), "1"),
    "forward": Effect("SECRET", lambda config: planned(config).forward, ("SECRET",)),
}  # fmt: skip

TOLD = {
    "hosts.port_range": PortRange(20000, 20099),
    "ccl.binding": "oneccl_bind_pt",
    "ccl.transport": "oneccl",
    "training.backend": "gloo",
    "training.precision": "fp32",
    "training.engine": "native",
    "training.compile": True,
    "training.compress_gradients": "bf16",
    "training.bucket_mb": 7,
    "training.static_graph": True,
    "training.as_written": True,
    "training.strict": True,
    "watch.checkpoint_every": Interval(90, "s"),
    "watch.grace_period": 3,
    "watch.heartbeat_timeout": 7,
    "watch.telemetry": "none",
}
"""Settings that are passed to the ranks, with values that differ from the defaults."""

OF_A_RUN = {"hosts.master_port", "output.log_dir", "output.tee", "output.verbose"}
"""Settings whose effect only a running job shows: see the test with a real rank below."""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a hostfile and an mpiexec."""
    monkeypatch.chdir(tmp_path)
    Path("nodes").write_text("x\ny\n")
    Path("their-mpi").mkdir()
    Path("their-mpi/mpiexec").write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.0'\n")
    Path("their-mpi/mpiexec").chmod(0o755)
    return tmp_path


def both_ways(key: str, value: str, given: Mapping[str, str] | None = None) -> tuple[Config, Config]:
    """Two configurations: one has ``key`` set on the command line, and one has it set in a file."""
    others = [(name, text, "--set") for name, text in (given or {}).items()]
    by_option = load([*others, (key, value, "--set")], environ=ENVIRON)
    text = yaml_text({SETTINGS[key]: by_option.value(SETTINGS[key])})
    return by_option, load(others, file=Path("written.yaml"), text=text, environ=ENVIRON)


def test_the_tables_have_every_setting() -> None:
    assert {key for key, setting in SETTINGS.items() if setting.rank_variable} == set(TOLD)
    assert {*EFFECTS, *TOLD, *OF_A_RUN} == set(SETTINGS)


def seen(effect: Effect, config: Config) -> Any:
    try:
        return effect.seen(config)
    except CpulaunchError as error:
        return error  # without the setting, planning may fail


@pytest.mark.parametrize("key", EFFECTS)
def test_a_setting_takes_effect(key: str) -> None:
    effect = EFFECTS[key]
    without = load([(name, text, "--set") for name, text in effect.given.items()], environ=ENVIRON)
    assert seen(effect, without) != effect.expected
    for config in both_ways(key, effect.text, effect.given):
        assert effect.seen(config) == effect.expected


@pytest.mark.parametrize("key", TOLD)
def test_ranks_read_the_values_that_were_set(key: str) -> None:
    value = TOLD[key]
    assert value != SETTINGS[key].default
    for config in both_ways(key, SETTINGS[key].kind.to_text(value)):
        assert rank_setting(SETTINGS[key], planned(config).env) == value


SCRIPT = """
import json, os
from dataclasses import asdict
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.settings import Table
from cpulaunch.runtime.settings import training_settings
binding = rank_setting(Table.ccl.binding, os.environ)
transport = rank_setting(Table.ccl.transport, os.environ)
every = str(rank_setting(Table.watch.checkpoint_every, os.environ))
grace = rank_setting(Table.watch.grace_period, os.environ)
heartbeat = rank_setting(Table.watch.heartbeat_timeout, os.environ)
telemetry = rank_setting(Table.watch.telemetry, os.environ)
watch = {"checkpoint_every": every, "grace_period": grace, "telemetry": telemetry}
watch["heartbeat_timeout"] = heartbeat
told = {"binding": binding, "transport": transport, **watch, "port": os.environ["MASTER_PORT"]}
print(json.dumps({**asdict(training_settings()), **told}))
"""


def test_a_real_rank_gets_all_variables(cpulaunch: Run, directory: Path) -> None:
    """``output.tee`` is none, so only the log in ``output.log_dir`` has the output."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    (directory / "tell.py").write_text(SCRIPT)
    expected = {key: value for key, value in TOLD.items() if key != "hosts.port_range"}  # gloo takes none
    settings = {**expected, "hosts.master_port": port, "output.log_dir": "elsewhere", "output.tee": "none"}
    settings["output.verbose"] = True
    options = [
        word
        for key, value in settings.items()
        for word in ("--set", f"{key}={SETTINGS[key].kind.to_text(value)}")
    ]
    done = cpulaunch("run", "-n", "1", *options, "tell.py")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr + shlex.join(options)
    assert "rank 0 on localhost: type=exit code=0" in done.stderr
    (log,) = directory.glob("elsewhere/*/rank-0.log")
    told = json.loads(log.read_text())
    told["checkpoint_every"] = Every().from_text(told["checkpoint_every"])
    assert {key: told[key.partition(".")[2]] for key in expected} == expected
    assert (told["in_job"], told["port"]) == (True, str(port))
