"""Spawners as real processes; a script replaces ssh and runs everything on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import TIMEOUT, clean_environment, processes_with
from support.marks import repeat
from support.namespaces import until

from cpulaunch.agent.spawner.loop import FAILED
from cpulaunch.discovery.host.installation import installation_here

# $3 is the host, and $4 is the command for its shell.
SSH = """\
#!/bin/sh
case $3 in
  dead*) echo "ssh: connect to host $3 port 22: No route to host" >&2; exit 255;;
  locked*) echo "root@$3: Permission denied (publickey)." >&2; exit 255;;
esac
if [ -n "$ALONE" ] && [ -n "$HOST" ]; then
  echo "root@$3: Permission denied (publickey)." >&2; exit 255
fi
printf 'Welcome to %s! ' "$3"
exec env -i PATH="$PATH" HOST="$3" ALONE="$ALONE" SPAWNED_IN="$SPAWNED_IN" sh -c "$4"
"""
SHOW = """\
import json, os, sys
from cpulaunch import variables
identity = [int(os.environ[name]) for name in variables.LOCAL_IDENTITY]
sys.stdout.write(json.dumps([os.environ.get("HOST", "here"), *identity, os.environ["WISH"]]) + chr(10))
"""


class Spawned:
    """Starts spawners; ``mark`` is a variable in the environment of all their processes."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.mark = directory, f"SPAWNED_IN={directory}"
        (ssh := directory / "ssh").write_text(SSH)
        ssh.chmod(0o755)
        self.env = clean_environment(SPAWNED_IN=str(directory), WISH="for peace")

    def command(self, hosts: str, agent: str, *options: str, reader: int = 0) -> list[str]:
        (self.directory / "hosts").write_text(hosts)
        (self.directory / "agent.py").write_text(
            f"import sys; sys.path.append({str(Path(__file__).parents[3])!r})\n{agent}"
        )
        spawner = installation_here().spawner
        own = [str(self.directory / "ssh"), "hosts", str(reader), *options]
        return [
            sys.executable,
            "-I",
            "-S",
            spawner,
            *own,
            "--",
            sys.executable,
            str(self.directory / "agent.py"),
        ]

    def run(
        self, hosts: str, agent: str, *options: str, stdin: str = "", reader: int = 0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(hosts, agent, *options, reader=reader),
            cwd=self.directory,
            env={**self.env, **env},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )

    @contextlib.contextmanager
    def running(self, hosts: str, agent: str, **env: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            self.command(hosts, agent),
            cwd=self.directory,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=TIMEOUT)
            self.gone()

    def gone(self) -> None:
        until(lambda: not processes_with(self.mark), "all processes to end", TIMEOUT)


@pytest.fixture
def spawned(tmp_path: Path) -> Iterator[Spawned]:
    spawned = Spawned(tmp_path)
    yield spawned
    spawned.gone()


def lines(count: int, ranks: int = 1) -> str:
    return "".join(f"node{number} {ranks}\n" for number in range(count))


def shown(done: subprocess.CompletedProcess[str]) -> list[list]:
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(map(json.loads, done.stdout.splitlines()), key=lambda row: row[1])


def test_each_agent_gets_its_rank_and_the_environment(spawned: Spawned) -> None:
    assert shown(spawned.run("node0 2 here\nnode1 1\n", SHOW)) == [
        ["here", 0, 3, 0, 2, "for peace"],
        ["here", 1, 3, 1, 2, "for peace"],
        ["node1", 2, 3, 0, 1, "for peace"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("alone", ["", repeat("1")])
def test_many_hosts_start_in_a_tree_or_flat_if_they_can_not_reach_each_other(
    spawned: Spawned, alone: str
) -> None:
    found = shown(spawned.run(lines(70), SHOW, ALONE=alone))
    assert [row[:2] for row in found] == [[f"node{number}", number] for number in range(70)]


def test_the_launching_hosts_own_variables_are_passed_on_only_if_named(spawned: Spawned) -> None:
    show = "import os; print(os.environ.get('SLURM_PROCID'), os.environ.get('XDG_DATA_HOME'))"
    env = {"SLURM_PROCID": "3", "XDG_DATA_HOME": "/d"}
    done = spawned.run("node0 1\n", show, "-x", "SLURM_PROCID", **env)
    assert (done.returncode, done.stdout) == (0, "3 None\n")


def not_started(line: str) -> dict[str, str]:
    """The host on which no agent could be started, and the reason."""
    found: dict[str, str] = json.loads(line.removeprefix(FAILED))
    return found


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("dead", "connect to host dead port 22: No route to host"),
        ("locked", "root@locked: Permission denied (publickey)."),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_with_the_cause_and_ends_the_others(
    spawned: Spawned, host: str, why: str
) -> None:
    done = spawned.run(f"{host} 1\nnode1 1\nnode2 1 here\n", "import time; time.sleep(300)")
    assert done.returncode == 3
    assert not_started(done.stderr) == {"host": host, "why": why}


@pytest.mark.repeats
@pytest.mark.slow
def test_a_host_that_other_hosts_could_not_reach_is_also_tried_from_here(spawned: Spawned) -> None:
    done = spawned.run(lines(40).replace("node39", "dead39"), "import time; time.sleep(300)")
    assert done.returncode == 3
    why = "connect to host dead39 port 22: No route to host"
    assert not_started(done.stderr) == {"host": "dead39", "why": why}


@pytest.mark.parametrize("hosts", ["node0 2\nnode1 1\n", "node0 2 here\nnode1 1\n"])
def test_a_failed_agent_ends_the_others_if_there_is_no_launcher(spawned: Spawned, hosts: str) -> None:
    fail = (
        "import os, sys, time; from cpulaunch import variables\n"
        "sys.exit(5) if os.environ[variables.LOCAL_IDENTITY[0]] == '1' else time.sleep(300)"
    )
    assert spawned.run(hosts, fail).returncode == 5


@pytest.mark.parametrize("hosts", ["node0 1\nnode1 1\n", "node0 1 here\nnode1 1\n"])
def test_the_first_rank_alone_gets_stdin(spawned: Spawned, hosts: str) -> None:
    text = "for the first rank\n" * 20_000
    show = "import os, sys; print(len(sys.stdin.read()))"
    done = spawned.run(hosts, show, stdin=text)
    assert (done.returncode, sorted(done.stdout.split())) == (0, sorted([str(len(text)), "0"]))


@pytest.mark.parametrize("reader", [2, repeat(34)])
def test_any_rank_can_get_stdin_even_through_another_spawner(spawned: Spawned, reader: int) -> None:
    show = (
        "import os, sys; from cpulaunch import variables\n"
        "sys.stdout.write(f'{os.environ[variables.LOCAL_IDENTITY[0]]} {len(sys.stdin.read())}\\n')"
    )
    done = spawned.run(lines(reader + 1), show, stdin="x" * 200_000, reader=reader)
    assert dict(map(str.split, done.stdout.splitlines()))[str(reader)] == "200000"


def test_a_first_rank_that_ignores_stdin_does_not_delay_the_end(spawned: Spawned) -> None:
    done = spawned.run("node0 1\nnode1 1\n", "print('done')", stdin="x" * 1_000_000)
    assert (done.returncode, done.stdout) == (0, "done\ndone\n")


def test_no_output_is_lost_if_programs_print_at_once_and_end(spawned: Spawned) -> None:
    command = spawned.command("node0 2\nnode1 2\n", "")
    command[command.index("--") + 1 :] = ["/bin/echo", "at once"]
    done = subprocess.run(
        command, cwd=spawned.directory, env=spawned.env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "at once\n" * 4, "")


@pytest.mark.parametrize("hosts", ["node0 1\n", "node0 1 here\n"])
def test_an_agent_that_can_not_be_started_is_an_error_of_its_host(spawned: Spawned, hosts: str) -> None:
    command = spawned.command(f"{hosts}node1 1\n", "")
    command[command.index("--") + 1 :] = ["/nowhere/python"]
    done = subprocess.run(
        command, cwd=spawned.directory, env=spawned.env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 3
    first, *_ = done.stderr.splitlines()
    assert not_started(first)["host"] in ("node0", "node1")
    assert not_started(first)["why"] == "/nowhere/python: No such file or directory"


READY = "import sys, time; sys.stdout.write('ready\\n'); sys.stdout.flush(); time.sleep(300)"


def wait_until_ready(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout
    for _ in range(count):
        assert process.stdout.readline() == "ready\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, repeat(signal.SIGINT)])
def test_a_signal_ends_all_agents(spawned: Spawned, number: int) -> None:
    with spawned.running(lines(35) + "node35 1 here\n", READY) as process:
        wait_until_ready(process, 36)
        process.send_signal(number)
        assert process.wait(TIMEOUT) == 128 + number
        assert not processes_with(spawned.mark)


def test_a_second_signal_kills(spawned: Spawned) -> None:
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{READY}"
    with spawned.running("node0 1\nnode1 1 here\n", stubborn) as process:
        wait_until_ready(process, 2)
        process.terminate()
        process.terminate()
        # The kernel merges two signals that arrive together, so repeat the signal.
        until(lambda: process.poll() is not None or process.terminate(), "the spawner to end", TIMEOUT)
        assert not processes_with(spawned.mark)


@pytest.mark.slow
def test_nothing_outlives_a_spawner_that_is_killed(spawned: Spawned) -> None:
    with spawned.running(lines(35) + "node35 1 here\n", READY) as process:
        wait_until_ready(process, 36)
        process.kill()
        spawned.gone()


def test_a_spawner_of_another_version_is_reported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", installation_here().spawner],
        input='{"type": "begin"}\n',
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 3
    assert done.stderr == "this host has another version of cpulaunch: an unknown kind of message, 'begin'\n"
