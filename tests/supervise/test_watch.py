"""The control channel and the agents under attack, and without a launcher."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from support.chaos import PROGRAM
from support.command import TIMEOUT, Run, clean_environment, mpi_options, processes_with
from support.jobs import job, outcome

from cpulaunch.messages import MAX_LINE, Lines, decode, encode, pack, proof, unpack

UNTIL_TOLD = "import pathlib, time\nprint('ready')\nwhile not pathlib.Path('go').exists(): time.sleep(0.02)\n"


def control_port(launcher: subprocess.Popen[str]) -> int:
    (listening,) = [
        c for c in psutil.Process(launcher.pid).net_connections() if c.status == psutil.CONN_LISTEN
    ]
    return listening.laddr.port


HOSTILE = {
    "nothing": b"",
    "noise": bytes(range(256)) * 100,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no object": b"[1, 2]\n",
    "no type": b"{}\n",
    "no proof": encode({"type": "hello", "rank": 0, "salt": "s"}),
    "wrong proof": encode({"type": "hello", "rank": 0, "salt": "s", "proof": "0" * 64}),
    "odd proof": encode({"type": "hello", "rank": 0, "salt": "s", "proof": "é"}),
    "odd rank": encode({"type": "hello", "rank": "0", "salt": "s", "proof": "0"}),
    "rank that isn't": encode({"type": "hello", "rank": 7, "salt": "s", "proof": proof("", "agent", "", 7)}),
    "deep": b"[" * 100_000 + b"\n",
    "endless line": b"x" * (MAX_LINE + 10),
    "line too long": b"x" * (MAX_LINE + 10) + b"\n",
}


def say(port: int, data: bytes) -> None:
    """What a stranger sends, who then waits until it is hung up on; that may be before all is sent."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as it:
        it.sendall(data)
        it.shutdown(socket.SHUT_WR)
        while it.recv(1 << 16):
            pass


def test_strangers_on_the_control_port_do_no_harm(marked, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("w") as file, job(tmp_path, marked, [], UNTIL_TOLD, stderr=file) as launcher:
        port = control_port(launcher)
        quiet = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        for data in HOSTILE.values():
            say(port, data)
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0
        for connection in quiet:
            connection.close()
    assert [rank["status"] for rank in outcome(tmp_path)["ranks"]] == ["exit 0", "exit 0"]
    assert "Traceback" not in errors.read_text()


def test_a_fuzzer_on_the_control_port_costs_no_memory(marked, tmp_path: Path) -> None:
    dice = random.Random(4711)
    with job(tmp_path, marked, [], UNTIL_TOLD) as launcher:
        port = control_port(launcher)
        sizes = []
        for number in range(600):
            say(port, dice.choice(list(HOSTILE.values())) + dice.randbytes(dice.randrange(100_000)))
            if number >= 200:  # by then it has all that it needs
                sizes.append(psutil.Process(launcher.pid).memory_info().rss)
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0
    assert sizes[-1] < sizes[0] + (8 << 20)


@pytest.mark.parametrize(
    "flavour",
    [
        "local",
        "intel",
        pytest.param("mpich", marks=pytest.mark.slow),
        pytest.param("openmpi", marks=pytest.mark.slow),
    ],
)
def test_a_killed_agent_is_a_killed_rank_and_its_program_goes_with_it(
    marked, tmp_path: Path, flavour: str
) -> None:
    options = [] if flavour == "local" else mpi_options(flavour)
    with job(tmp_path, marked, options, UNTIL_TOLD) as launcher:
        (plan,) = tmp_path.glob("runs/*/plan.json")
        assert json.loads(plan.read_text())["world_size"] == 2
        program = next(
            pid for pid in processes_with("LOCAL_RANK=1") if pid in processes_with(f"TEST_MARK={tmp_path}")
        )
        os.kill(psutil.Process(program).ppid(), signal.SIGKILL)
        assert launcher.wait(TIMEOUT) == 137
    assert program not in processes_with("LOCAL_RANK=1")  # gone, or a zombie that no init reaps
    assert outcome(tmp_path)["first_failure"]["rank"] == 1


def test_without_a_launcher_the_job_runs_and_says_what_is_lost(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("import sys; print('hello'); sys.exit(6)")
    script = cpulaunch("run", "-n", "1", "--dry-run", "--format", "shell", "hello.py").stdout
    env = clean_environment(CPULAUNCH_CONTROL="127.0.0.1:1", CPULAUNCH_TOKEN="x")
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 6
    assert done.stdout == "[0] hello\n"
    assert "can't reach the launcher at 127.0.0.1:1 (Connection refused): the job runs, but" in done.stderr


def test_without_a_launcher_a_line_without_end_does_no_harm(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "bar.py").write_text("for i in range(60_000): print('\\r step %40d' % i, end='')")
    script = cpulaunch("run", "-n", "1", "--dry-run", "--format", "shell", "bar.py").stdout
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=clean_environment(), capture_output=True, timeout=TIMEOUT
    )
    assert (done.returncode, done.stdout.count(b"step")) == (0, 60_000)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3_000_000])
def test_a_launcher_that_never_answers_costs_no_output(cpulaunch: Run, tmp_path: Path, size: int) -> None:
    (tmp_path / "much.py").write_text(f"for i in range({size} // 50 + 1): print('x' * 49)")
    script = cpulaunch("run", "-n", "1", "--dry-run", "--format", "shell", "much.py").stdout
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        env = clean_environment(CPULAUNCH_CONTROL=address, CPULAUNCH_TOKEN="x")
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, timeout=TIMEOUT
        )
    assert (done.returncode, done.stdout.count(b"x")) == (0, 49 * (size // 50 + 1))
    assert b"no answer within 10 s" in done.stderr


def test_a_agent_that_dies_before_its_hello_is_noticed(marked, tmp_path: Path) -> None:
    """The program's own start kills its agent, most of the time before that has said hello."""
    (tmp_path / "kill.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getppid(), 9)\ntime.sleep(300)"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "kill.py"],
        cwd=tmp_path,
        env=clean_environment(**marked),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode in (3, 137)
    assert outcome(tmp_path)["first_failure"]["rank"] == 1


def test_a_launcher_that_does_not_know_the_token_is_not_obeyed(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')")
    script = cpulaunch("run", "-n", "1", "--dry-run", "--format", "shell", "hello.py").stdout
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        env = clean_environment(
            CPULAUNCH_CONTROL=f"127.0.0.1:{impostor.getsockname()[1]}", CPULAUNCH_TOKEN="secret"
        )
        running = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=env, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(encode({"type": "challenge", "salt": "s"}))
            hello = decode(connection.makefile("rb").readline())
            connection.sendall(encode({"type": "welcome", "proof": "0" * 64}))
            connection.sendall(encode({"type": "end", "signal": 9, "grace": 0}))
            out, err = running.communicate(timeout=TIMEOUT)
    assert "secret" not in json.dumps(hello)
    assert (running.returncode, out) == (0, "[0] hello\n")
    assert "it does not know the job's token" in err


class TestLanguage:
    @pytest.mark.parametrize("data", [b"", b"plain", "é☃".encode(), "é".encode()[:1], bytes(range(256))])
    def test_any_output_survives(self, data: bytes) -> None:
        assert unpack(decode(encode({"type": "output", "data": pack(data)}).rstrip())["data"]) == data

    @pytest.mark.parametrize(
        ("pieces", "lines", "rest"),
        [
            ([b"a\nb\n"], [b"a", b"b"], b""),
            ([b"a", b"b\nc"], [b"ab"], b"c"),
            ([b"\n\n"], [b"", b""], b""),
            ([b""], [], b""),
        ],
    )
    def test_lines_are_cut_wherever_the_pieces_end(self, pieces, lines, rest) -> None:
        cutter = Lines()
        assert [line for piece in pieces for line in cutter.feed(piece)] == lines
        assert cutter.rest == rest

    def test_a_line_without_end_is_refused(self) -> None:
        with pytest.raises(ValueError, match="too long"):
            list(Lines().feed(b"x" * (MAX_LINE + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "ccl"])
@pytest.mark.parametrize(
    ("how", "code", "kind"), [("raise", 1, "error"), ("kill", 137, "signal"), ("exit", 5, "exit")]
)
def test_the_cause_is_named_though_the_others_wait_in_a_collective(
    marked, tmp_path: Path, backend: str, how: str, code: int, kind: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "cpulaunch", "run", "-n", "2", "--tee", "all", "--backend", backend]
    with subprocess.Popen(
        [*command, "program.py", backend, how, "1"],
        cwd=tmp_path,
        env=clean_environment(**marked),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        killer = threading.Timer(TIMEOUT, launcher.kill)
        killer.start()
        assert launcher.stdout
        ready = 0
        while ready < 2 and (line := launcher.stdout.readline()):
            ready += line.endswith("] ready\n")
        (tmp_path / "trigger").touch()
        launcher.stdout.read()
        assert launcher.wait(TIMEOUT) == code
        killer.cancel()
    result = outcome(tmp_path)
    assert (result["kind"], result["first_failure"]["rank"]) == (kind, 1)
