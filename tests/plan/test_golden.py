"""Whole plans and commands, compared as text.  ``UPDATE_GOLDEN=1 pytest tests/plan`` writes them anew: read the diff."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.command import REPOSITORY

from cpulaunch import launchers, variables
from cpulaunch.cli.run.command import run_parser
from cpulaunch.cli.run.plan_text import plan_as_json, plan_as_text
from cpulaunch.cli.run.preview import picture_of_first_host
from cpulaunch.config.load import load
from cpulaunch.discovery.host.lscpu import topology_from_lscpu
from cpulaunch.launchers.command import PORT_UNWATCHED, Installation, shell
from cpulaunch.model.facts import Facts, HostFacts
from cpulaunch.model.hosts import Host, parse_hostfile, parse_hosts
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.plan import Program

HERE = Path(__file__).parent
BIG = "tests/plan/2x28.lscpu"
FOUR = "hostfiles/four-nodes"

CASES = {
    # the canonical case: 4 hosts x 4 ranks
    "four-by-four.ssh": ["-f", FOUR],
    "four-by-four.intel": ["-f", FOUR, "--mpi", "intel"],
    "four-by-four.mpich": ["-f", FOUR, "--mpi", "mpich"],
    "four-by-four.openmpi": ["-f", FOUR, "--mpi", "openmpi", "-x", "HF_TOKEN"],
    "uneven.intel": ["--hosts", "a:3,b:1", "--mpi", "intel", "--env", "SECRET=s", "--mpi-args=-print-rank-map",
    ],
    "uneven.openmpi": ["--hosts", "a:3,b:1", "--mpi", "openmpi", "--env", "SECRET=s"],
    "uneven-over-psm3.intel": ["--hosts", "a:3,b:1", "--mpi", "intel", "--provider", "psm3"],
    "uneven.slurm": ["--hosts", "a:3,b:1", "--launcher", "slurm", "--env", "SECRET=s"],
    "uneven.ssh": ["--hosts", "a:3,b:1", "--launcher", "ssh", "--env", "SECRET=s", "-x", "HF_TOKEN"],
    "gloo-on-addresses.intel": [
        "--hosts", "10.0.0.1,10.0.0.2", "--mpi", "intel", "-n", "4", "--backend", "gloo", "--interface", "ib0",
    ],
}  # fmt: skip

ENVIRON = {"HF_TOKEN": "hunter2", "LC_ALL": "C.UTF-8", "XDG_CONFIG_HOME": "/nowhere"}
INSTALLATION = Installation(
    "/venv/cpulaunch/agent/run_agent.py",
    "/venv/cpulaunch/launchers/ssh.sh",
    "/venv/cpulaunch/agent/run_spawner.py",
)
PROGRAM = Program(("/venv/bin/python", "train.py", "--lr", "0.1"), True, "/home/me", "/venv/bin/python")


def listed(options: list[str]) -> tuple[Host, ...]:
    if "-f" in options:
        return parse_hostfile((REPOSITORY / FOUR).read_text(), FOUR)
    if "--hosts" not in options:
        return ()
    return parse_hosts(options[options.index("--hosts") + 1], "--hosts")


def dry_run(*options: str, format: str) -> str:
    """The output of ``cpulaunch run --dry-run --lscpu 2x28.lscpu``, made from values."""
    config = load(run_parser().parse_args(run_parser().split(options)[0]).given, environ=ENVIRON)
    topology = topology_from_lscpu((REPOSITORY / BIG).read_text())
    like = f"the one in {BIG}"
    facts = Facts(like=HostFacts(topology), listed=listed(list(options)), like_what=like)
    plan = make_plan(config, facts, PROGRAM)
    commands = launchers.load(plan.launcher).commands(plan, INSTALLATION)
    if format == "json":
        return plan_as_json(plan, commands) + "\n"
    if format == "shell":
        return shell(commands, PORT_UNWATCHED)
    picture = picture_of_first_host(plan, facts, width=80, colour=False, unicode=True, table=False)
    return plan_as_text(plan, commands, picture, like=like, verbose=config.output.verbose)


# Launchers have different commands.  Plans as text or JSON hardly differ, so only a few are golden.
GOLDEN = [
    *((case, "shell") for case in CASES),
    *((case, "text") for case in ("four-by-four.ssh", "uneven.intel", "gloo-on-addresses.intel")),
    ("uneven.intel", "json"),
]


@pytest.mark.parametrize(("case", "format"), GOLDEN)
def test_a_dry_run_equals_the_golden_text(case: str, format: str) -> None:
    text = dry_run(*CASES[case], format=format)
    golden = HERE / "golden" / (case + {"text": ".txt", "json": ".json", "shell": ".sh"}[format])
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert "hunter2" not in text


def test_the_clusters_page_shows_the_real_plan() -> None:
    golden = (HERE / "golden" / "four-by-four.ssh.txt").read_text()
    script = "examples/digits.py"  # the command has to work in a checkout
    assert (REPOSITORY / script).is_file()
    typed = f"$ cpulaunch run -f {FOUR} --lscpu {BIG} --dry-run {script}\n"
    quoted = golden.partition("\n2 sockets")[0]
    assert typed + quoted + "…\n" in (REPOSITORY / "docs" / "clusters.md").read_text()


def test_the_clusters_page_shows_the_real_hostfile() -> None:
    text = (REPOSITORY / "docs" / "clusters.md").read_text()
    assert f"$ cat {FOUR}\n{(REPOSITORY / FOUR).read_text()}" in text


def test_the_connections_of_communication_threads_are_shown() -> None:
    text = dry_run("-f", FOUR, "--ccl-transport", "tcp", "--ccl-worker-count", "2", format="text")
    assert "\ntransport: shm+tcp, 2 connections between two ranks\n" in text


def test_masks_are_shown_on_request() -> None:
    text = dry_run("-f", FOUR, "-v", format="text")
    masks = "node[1-4] (4 hosts): [3fff,fffc000,3fff0000000,fffc0000000000]"
    assert f"Masks in the format of I_MPI_PIN_DOMAIN (workers' cores included)\n  {masks}\n" in text


def test_secrets_are_not_in_argument_lists() -> None:
    for case in ("uneven.intel", "uneven.openmpi", "uneven.slurm", "uneven.ssh"):
        document = json.loads(dry_run(*CASES[case], format="json"))
        assert not any("SECRET" in word for command in document["commands"] for word in command["argv"])


def test_the_documented_keys_exist() -> None:
    document = json.loads(dry_run("-f", FOUR, format="json"))
    assert document["schema"] == 1
    assert (document["launcher"], document["starter"], document["world_size"]) == ("ssh", "ssh", 16)
    assert document["program"] == ["/venv/bin/python", "train.py", "--lr", "0.1"]
    host = document["hosts"][0]
    assert (host["host"], host["assumed"], host["env"]) == (
        "node1",
        True,
        {},
    )
    assert host["ranks"][1] == {
        "rank": 1,
        "local_rank": 1,
        "cores": "14-27",
        "comm_cores": "",
        "numa_nodes": "0",
        "threads": 14,
        "memory_policy": "prefer:0",
        "env": {"OMP_PLACES": "{14:14},{15}:13"},
    }
    assert document["env"]["CCL_ATL_TRANSPORT"] == "ofi"
    assert set(document["commands"][0]) == {"host", "argv", "env", "files"}
    assert {"key": "hosts.hostfile", "value": FOUR, "origin": "-f"} in document["settings"]


def test_common_variables_of_local_commands_are_listed_once() -> None:
    document = json.loads(dry_run("-n", "4", format="json"))
    assert document["shared_env"][variables.PLACEMENT[0]].startswith("{")
    rank, _, local_rank, _ = variables.LOCAL_IDENTITY
    assert [command["env"] for command in document["commands"]] == [
        {rank: str(number), local_rank: str(number)} for number in range(4)
    ]


@pytest.mark.parametrize(
    ("options", "environ", "level"),
    [((), {}, "error"), (("-v",), {}, "error"), ((), {"CCL_LOG_LEVEL": "warn"}, "warn")],
)
def test_oneccl_prints_warnings_only_if_ccl_log_level_is_set(options, environ, level) -> None:
    config = load(run_parser().parse_args(options).given, environ={**ENVIRON, **environ})
    facts = Facts(like=HostFacts(topology_from_lscpu((REPOSITORY / BIG).read_text())))
    assert make_plan(config, facts, PROGRAM).env["CCL_LOG_LEVEL"] == level
    assert config.environ.get("CCL_LOG_LEVEL") == environ.get("CCL_LOG_LEVEL")
