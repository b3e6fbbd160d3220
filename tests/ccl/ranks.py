"""Rank processes that stay alive and run functions of `programs` and `programs_torch`, so that torch is imported once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORKER = [sys.executable, str(HERE / "worker.py")]
START_LIMIT = 120.0  # seconds; importing torch is slow where cores are few


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, size: int, port: int, **more: str) -> dict[str, str]:
    """The environment that torchrun gives a rank with one thread, without variables of a surrounding job."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CCL_", "FI_", "GLOO_", "PMI"))}
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return clean | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path), **more,
    }  # fmt: skip


class Ranks:
    """`size` processes on this host, in a ccl group; `call` runs a function in each process."""

    def __init__(self, size: int, **variables: str) -> None:
        port = free_port()
        self._meet([
            subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
                             env=environment(rank, size, port, **variables))
            for rank in range(size)
        ])  # fmt: skip

    @classmethod
    def of(cls, processes: list[subprocess.Popen[str]]) -> Ranks:
        """Ranks in the given ``processes``, which run WORKER on any host and have a pipe as stdin."""
        ranks = cls.__new__(cls)
        ranks._meet(processes)
        return ranks

    def _meet(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes, self.size = processes, len(processes)
        try:
            self.call("hello", limit=START_LIMIT)
        except BaseException:
            self.close()
            raise

    def call(
        self, function: str, *args: Any, limit: float = 60.0, only: list[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run `programs.function` in all ranks, or `only` in some.  AssertionError if a rank raises."""
        chosen = [self.processes[rank] for rank in only] if only is not None else self.processes
        request = json.dumps([function, args, kwargs]) + "\n"
        for process in chosen:
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
        until = time.monotonic() + limit
        answers = [self._answer(process, until) for process in chosen]
        errors = [
            f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer
        ]
        assert not errors, "\n".join(errors)
        return [answer["result"] for answer in answers]

    @staticmethod
    def _answer(process: subprocess.Popen[str], until: float) -> Any:
        assert process.stdout is not None

        def ring(*_: object) -> None:
            raise TimeoutError("a rank did not answer")

        previous = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, max(until - time.monotonic(), 0.01))
        try:
            line = process.stdout.readline()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        if line:
            return json.loads(line)
        said = process.stderr.read() if process.stderr else ""
        return {"error": f"ended with {process.wait(10)} {said}"}

    def close(self) -> list[int]:
        """End the ranks, forcibly after 20 s, and return their exit codes."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        codes = []
        for process in self.processes:
            try:
                codes.append(process.wait(20))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
            assert process.stdout is not None
            process.stdout.close()
        return codes


def run_script(
    size: int, source: str, *, limit: float = 90.0, python: str = sys.executable, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run `source` as `size` ranks until they end.  A rank that exceeds `limit` is killed (exit code -9)."""
    port = free_port()
    processes = [
        subprocess.Popen([python, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env=environment(rank, size, port, **variables), start_new_session=True)
        for rank in range(size)
    ]  # fmt: skip
    until = time.monotonic() + limit
    results = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        results.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return results
