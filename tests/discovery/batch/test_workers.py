"""Waiting for workers.  A listening socket that greets like sshd takes the place of a worker."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from cpulaunch.discovery.batch import workers
from cpulaunch.discovery.batch.workers import wait_for_workers
from cpulaunch.errors import HostError

NAMES = ("127.0.0.1", "127.0.0.2")


@contextlib.contextmanager
def greeting(address: str, port: int, text: bytes = b"SSH-2.0-test\r\n") -> Iterator[int]:
    """Send ``text`` on each connection; yield the port."""
    with socket.create_server((address, port)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(text)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PAUSE", 0.01)


def test_nothing_is_printed_if_all_workers_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with greeting(NAMES[0], 0) as port, greeting(NAMES[1], port):
        monkeypatch.setattr(workers, "_port", lambda name: port)
        wait_for_workers(NAMES, pytest.fail)


def test_waiting_ends_when_the_last_worker_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with contextlib.ExitStack() as late, greeting(NAMES[0], 0) as port:
        monkeypatch.setattr(workers, "_port", lambda name: port)

        def tell(line: str) -> None:
            said.append(line)
            late.enter_context(greeting(NAMES[1], port))

        wait_for_workers(NAMES, tell)
    assert said == [
        f"waiting for 1 of 2 workers, for 300 s at most: 127.0.0.2: port {port}: Connection refused"
    ]


@pytest.mark.parametrize(
    ("names", "text", "says"),
    [
        (("no-such.invalid",), b"", "1 of 1 worker could not be reached within 0 s: no-such.invalid: "),
        (
            NAMES,
            b"HTTP/1.1 400\r\n",
            "2 of 2 workers .*127.0.0.1: port [0-9]+: no sshd answers there",
        ),
    ],
)
def test_the_error_after_the_timeout_names_missing_workers_and_causes(
    names: tuple[str, ...], text: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with greeting(NAMES[0], 0, text) as port, greeting(NAMES[1], port, text):
        monkeypatch.setattr(workers, "_port", lambda name: port)
        with pytest.raises(HostError, match=says) as caught:
            wait_for_workers(names, lambda line: None, limit=0)
    assert caught.value.hint
    assert "kubectl get pods" in caught.value.hint


def test_the_port_is_read_from_sshs_configuration() -> None:
    assert workers._port("localhost") == 22
