"""Agents without a launcher, with a silent launcher, and with another program on the launcher's port."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import subprocess
import time
from pathlib import Path
from signal import SIGTERM

import psutil
import pytest
from support.agents import TOKEN, PlayedLauncher, placement
from support.command import TIMEOUT, Run, clean_environment
from support.marks import repeat

from cpulaunch.agent.connection import Connection
from cpulaunch.agent.link import Link, LinkState
from cpulaunch.messages import (
    FROM_AGENT,
    AskTime,
    Beat,
    Challenge,
    End,
    Exit,
    Hello,
    LauncherReceipt,
    Receipt,
    Release,
    Started,
    Time,
    Welcome,
)
from cpulaunch.wire import decode, encode, proof


def test_a_job_without_a_launcher_runs_and_lists_the_missing_features(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("import sys; print('hello'); sys.exit(6)")
    script = cpulaunch("run", "-n", "1", "--dry-run", "--format", "shell", "hello.py").stdout
    env = clean_environment(CPULAUNCH_CONTROL="127.0.0.1:1", CPULAUNCH_TOKEN="x")
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 6
    assert done.stdout == "[0] hello\n"
    assert "can't reach the launcher at 127.0.0.1:1 (Connection refused): the job runs, but" in done.stderr


def test_without_a_launcher_an_endless_line_does_no_harm(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "bar.py").write_text("for i in range(60_000): print('\\r step %40d' % i, end='')")
    script = cpulaunch("run", "-n", "1", "--dry-run", "--format", "shell", "bar.py").stdout
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=clean_environment(), capture_output=True, timeout=TIMEOUT
    )
    assert (done.returncode, done.stdout.count(b"step")) == (0, 60_000)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, repeat(3_000_000)])
def test_no_output_is_lost_if_the_launcher_never_answers(cpulaunch: Run, tmp_path: Path, size: int) -> None:
    (tmp_path / "much.py").write_text(f"for i in range({size} // 50 + 1): print('x' * 49)")
    options = ("-n", "1", "--heartbeat-timeout", "2", "--dry-run", "--format", "shell")
    script = cpulaunch("run", *options, "much.py").stdout
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        env = clean_environment(CPULAUNCH_CONTROL=address, CPULAUNCH_TOKEN="x")
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, timeout=TIMEOUT
        )
    assert (done.returncode, done.stdout.count(b"x")) == (0, 49 * (size // 50 + 1))
    assert b"no answer within 2 s" in done.stderr


def test_the_agent_connects_again_if_the_launcher_hangs_up_before_its_welcome(tmp_path: Path) -> None:
    """The launcher hangs up if too many peers haven't authenticated, or if the agent's hello comes late."""
    with PlayedLauncher(placement(tmp_path), "print('hello')", hang_ups=3) as launcher:
        launcher.welcome()
        launcher.wait_for_output("hello")
        assert launcher.next(Exit).code == 0
        launcher.say(Release())
        assert launcher.end() == (0, "", "")


def test_the_agent_waits_for_a_slow_launcher_that_has_sent_its_challenge(tmp_path: Path) -> None:
    """The program continues, and its output is queued.  An agent that disconnects would count as ended."""
    placed = placement(tmp_path, heartbeat_timeout=1.5)
    program = "import pathlib, time\nprint('hello', flush=True)\ntime.sleep(3)\npathlib.Path('slept').touch()"
    with PlayedLauncher(placed, program) as launcher:
        launcher.say(Challenge("salt"))
        hello = launcher.next(Hello)
        while not (tmp_path / "slept").exists():  # twice the agent's timeout
            time.sleep(0.01)
        launcher.say(Welcome(proof(TOKEN, "launcher", hello.salt, hello.rank)))
        launcher.wait_for_output("hello")
        assert launcher.next(Exit).code == 0
        launcher.say(Release())
        assert launcher.end() == (0, "", "")


def test_progress_before_the_launchers_welcome_is_reported(tmp_path: Path) -> None:
    program = """
import os, pathlib
from cpulaunch import ledger
ledger.PROGRESS.pack_into(ledger.of_this_process, 0, ledger.MAGIC, ledger.HAS_OPTIMIZER, 3, 0, 1, 0, 0)
pathlib.Path("part").write_text(str(os.getpid()))
os.rename("part", "pid")
"""
    with PlayedLauncher(placement(tmp_path), program) as launcher:
        launcher.say(Challenge("salt"))
        hello = launcher.next(Hello)
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        while psutil.pid_exists(int((tmp_path / "pid").read_text())):
            time.sleep(0.01)
        launcher.say(Welcome(proof(TOKEN, "launcher", hello.salt, hello.rank)))
        assert launcher.next(Beat).steps == 3
        assert launcher.next(Exit).code == 0
        launcher.say(Release())
        assert launcher.end() == (0, "", "")


def test_nothing_is_lost_if_the_connection_is_reset_and_made_again(tmp_path: Path) -> None:
    program = "import sys\nprint('first', flush=True)\nsys.stdin.read()\nprint('second', flush=True)"
    placed = placement(tmp_path)
    with PlayedLauncher(placed, program, keeps_listening=True) as launcher:
        launcher.welcome()
        launcher.say(AskTime())
        launcher.next(Time)
        launcher.wait_for_output("first")
        launcher.reset()
        launcher.accept()
        launcher.welcome()
        launcher.say(LauncherReceipt(0))  # it has received nothing, so the agent sends everything again
        assert launcher.next(Receipt).total == 1
        launcher.next(Started)
        launcher.wait_for_output("second")
        assert launcher.next(Exit).code == 0
        launcher.say(Release())
        assert launcher.end() == (0, "", "")


@pytest.mark.parametrize("closes_the_old_first", [False, True])
def test_an_old_connection_that_works_again_does_not_undo_a_hello_over_a_new_one(
    closes_the_old_first: bool,
) -> None:
    """After this hello, the launcher uses only the new connection, and takes its end for the agent's end."""
    with socket.create_server(("127.0.0.1", 0)) as server, selectors.DefaultSelector() as selector:
        server.settimeout(TIMEOUT)
        link = Link(f"127.0.0.1:{server.getsockname()[1]}", TOKEN, 0, selector, patience=0.5)

        def turn() -> None:
            for key, events in selector.select(0.05):
                key.data.ready(events)
            link.check_time()

        def hello_over(connection: socket.socket) -> Hello:
            connection.sendall(encode(Challenge("salt")))
            connection.setblocking(False)
            while True:
                turn()
                with contextlib.suppress(BlockingIOError):
                    hello = decode(connection.recv(1 << 16), FROM_AGENT)
                    assert isinstance(hello, Hello)
                    return hello

        def accept(connection: socket.socket, hello: Hello) -> None:
            welcome = Welcome(proof(TOKEN, "launcher", hello.salt, 0))
            connection.sendall(encode(welcome) + encode(LauncherReceipt(0)))

        def wait_for(line: bytes, connection: socket.socket) -> None:
            while line not in received[connection]:
                turn()
                with contextlib.suppress(BlockingIOError):
                    data = connection.recv(1 << 16)
                    assert data, "the agent hung up"
                    received[connection] += data

        old, _ = server.accept()
        received = {old: b""}
        accept(old, hello_over(old))
        beat = encode(Beat())
        link.send(Beat())
        wait_for(beat, old)
        server.settimeout(0)
        new = None
        while new is None:  # the launcher's host doesn't acknowledge, so the agent connects again
            turn()
            with contextlib.suppress(BlockingIOError):
                new, _ = server.accept()
        received[new] = b""
        hello = hello_over(new)
        if closes_the_old_first:
            old.close()
        else:
            old.sendall(encode(AskTime()))  # makes its host acknowledge again
        for _ in range(5):
            turn()
        accept(new, hello)
        wait_for(beat, new)
        assert link.state is LinkState.UP
        link.close()
        for each in (old, new):
            each.close()


def test_a_read_reports_the_reset_that_an_earlier_write_found() -> None:
    """The kernel reports an error only once, so the read alone would find a normal end of the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, selectors.DefaultSelector() as selector:
        connection = Connection(socket.AF_INET, server.getsockname(), selector, None, 5.0)
        launchers, _ = server.accept()
        launchers.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        launchers.close()
        selector.select(TIMEOUT)
        connection.write(b"a beat\n")
        with pytest.raises(OSError, match="reset"):
            connection.read()
        connection.close()


def test_after_a_reset_a_closed_port_means_that_the_launcher_has_ended(
    tmp_path: Path,
) -> None:
    with PlayedLauncher(placement(tmp_path), "import time; print('hello'); time.sleep(60)") as launcher:
        launcher.welcome()
        launcher.next(Started)
        launcher.reset()
        code, _, _ = launcher.end()
    assert code == 128 + SIGTERM


def test_another_program_on_the_launchers_port_does_not_block_an_agent(tmp_path: Path) -> None:
    """Like the launcher, it sends a challenge, but it never answers the hello."""
    with PlayedLauncher(placement(tmp_path, heartbeat_timeout=0.1), "print('hello')") as impostor:
        impostor.say(Challenge("salt"))
        impostor.next(Hello)
        code, out, err = impostor.end()
    assert (code, out) == (0, "[0] hello\n")
    assert "no answer within 1 s" in err


def test_a_peer_that_sends_two_challenges_is_rejected(tmp_path: Path) -> None:
    """It could otherwise make the agent send answers forever."""
    with PlayedLauncher(placement(tmp_path), "print('hello')") as impostor:
        impostor.say(Challenge("salt"))
        impostor.say(Challenge("another"))
        code, out, err = impostor.end()
    assert (code, out) == (0, "[0] hello\n")
    assert "it challenges twice" in err


def test_a_malformed_salt_does_an_agent_no_harm(tmp_path: Path) -> None:
    with PlayedLauncher(placement(tmp_path), "print('hello')") as impostor:
        impostor.say_line(b'{"type":"challenge","salt":"\\ud800"}\n')
        impostor.next(Hello)
        impostor.say(Welcome("a guess"))
        code, out, err = impostor.end()
    assert (code, out) == (0, "[0] hello\n")
    assert "it does not know the job's token" in err


def test_a_launcher_without_the_token_is_not_obeyed(tmp_path: Path) -> None:
    with PlayedLauncher(placement(tmp_path), "print('hello')") as impostor:
        hello = impostor.welcome("a guess")
        impostor.say(End(9, 0.0))
        code, out, err = impostor.end()
    assert TOKEN not in hello.salt + hello.proof + hello.host
    assert (code, out) == (0, "[0] hello\n")
    assert "it does not know the job's token" in err
