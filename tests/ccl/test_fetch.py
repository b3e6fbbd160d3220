"""Fetching oneCCL's wheel fails quickly without a network, is tried once an hour, and needs no pip."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.command import REPOSITORY, TIMEOUT, Run
from support.marks import repeat
from support.terminal import Terminal

from cpulaunch.ccl import fetch, installed
from cpulaunch.ccl.installed import Built
from cpulaunch.errors import HostError

Index = Callable[[str], str]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A function that makes pip use an index that behaves like ``kind``, and returns the index's address."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_")) or name.endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    installed.cache_directory().mkdir(parents=True)
    with contextlib.ExitStack() as stack:

        def use(kind: str) -> str:
            server = stack.enter_context(socket.socket())
            server.bind(("127.0.0.1", 0))
            if kind != "closed port":
                server.listen(0)
            if kind == "dropped packets":  # the kernel drops further connections if the queue is full
                for _ in range(2):
                    waiting = stack.enter_context(socket.socket())
                    waiting.setblocking(False)
                    waiting.connect_ex(server.getsockname())
            url = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
            monkeypatch.setenv("PIP_INDEX_URL", url)
            return url

        yield use


def failure(tmp_path: Path, *, patient: bool = False) -> tuple[HostError, list[str]]:
    """Return the error of fetching the wheel, and the lines that were printed."""
    printed: list[str] = []
    with pytest.raises(HostError) as caught:
        fetch.fetch_wheel(tmp_path, lambda step, detail: printed.append(step), patient=patient)
    return caught.value, printed


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("closed port", "{}/oneccl-devel/: Connection refused"),
        repeat("no answer", "no answer from {}/oneccl-devel/ within 1.2 s"),
        repeat("dropped packets", "no answer from {}/oneccl-devel/ within 1.2 s"),
    ],
)
def test_an_unreachable_index_is_tried_once(tmp_path: Path, index: Index, kind: str, reason: str) -> None:
    reason = reason.format(index(kind))
    error, printed = failure(tmp_path)
    assert str(error) == f"pip could not fetch oneccl-devel {installed.ONECCL_VERSION}: {reason}"
    assert "cpulaunch ccl build --wheel" in str(error.hint)
    assert printed == [f"fetching oneccl-devel {installed.ONECCL_VERSION} (32 MB)"]
    again, printed = failure(tmp_path)
    assert str(again).endswith(f": {reason} (tried just now)")
    assert "`cpulaunch ccl build --oneccl` tries again" in str(again.hint)
    assert printed == []


def test_an_index_is_tried_again_after_an_hour_or_if_changed(tmp_path: Path, index: Index) -> None:
    index("closed port")
    failure(tmp_path)
    (memory,) = installed.cache_directory().glob("*.json")
    for age, asked in ((3500, False), (3700, True)):
        then = memory.stat().st_mtime - age
        os.utime(memory, (then, then))
        assert bool(failure(tmp_path)[1]) is asked
    other = index("closed port")
    error, printed = failure(tmp_path)
    assert other in str(error)
    assert printed
    memory.write_text("[]")  # malformed
    assert failure(tmp_path)[1]


def test_a_password_is_neither_kept_nor_shown(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index("closed port").replace("//", "//me:hunter2@"))
    error, _ = failure(tmp_path)
    assert "hunter2" not in f"{error} {error.hint}"
    (memory,) = installed.cache_directory().glob("*.json")
    assert "hunter2" not in memory.read_text()


@pytest.mark.slow
def test_an_explicit_build_always_tries_to_fetch(tmp_path: Path, index: Index, cpulaunch: Run) -> None:
    reason = f"{index('closed port')}/oneccl-devel/: Connection refused"
    failure(tmp_path)
    done = cpulaunch("ccl", "build", "--oneccl", env={"PIP_RETRIES": "1"})
    assert done.returncode == 3
    fetching, error, hint = done.stderr.splitlines()
    assert "fetching oneccl-devel" in fetching
    assert error.endswith(f"oneccl-devel {installed.ONECCL_VERSION}: {reason}")
    assert "needs the network, once" in hint


def test_on_a_terminal_the_error_is_on_its_own_line(tmp_path: Path, index: Index) -> None:
    index("closed port")
    command = [sys.executable, "-m", "cpulaunch", "ccl", "build", "--oneccl"]
    terminal = Terminal(tmp_path, {**os.environ, "PIP_RETRIES": "0", "TERM": "xterm"}, command)
    assert terminal.ends() == 3
    last, _, _ = terminal.raw.partition("cpulaunch: error: ")
    assert "fetching oneccl-devel" in last
    assert last.endswith("\r\n")


def test_a_run_that_needs_oneccl_does_not_try_again(
    built: Built, index: Index, cpulaunch: Run, show: Path
) -> None:
    """A run without oneCCL works without the network."""
    shutil.copytree(built.core.directory, installed.cache_directory() / built.core.directory.name)
    shutil.copytree(built.layer.directory, installed.cache_directory() / built.layer.directory.name)
    index("closed port")
    oneccl = ("--backend", "ccl", "--ccl-transport", "oneccl")
    first, second = (cpulaunch("run", "-n", "1", *oneccl, "show.py") for _ in range(2))
    for done in (first, second):
        assert done.returncode == 3
        assert "pip could not fetch oneccl-devel" in done.stderr
        assert "--ccl-transport tcp needs none" in done.stderr
    assert "fetching" in first.stderr
    assert "fetching" not in second.stderr
    without = cpulaunch("run", "-n", "1", "--backend", "ccl", "--engine", "torch", "show.py")  # no kernels
    assert without.returncode == 0, without.stderr


@pytest.fixture(scope="module")
def local_index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """A private index with the pinned wheel, and the paths requested from it."""
    root = tmp_path_factory.mktemp("index")
    place = root / "simple" / "oneccl-devel"
    place.mkdir(parents=True)
    wheel = fetch.fetch_wheel(tmp_path_factory.mktemp("fetched"), lambda step, detail: None, patient=True)
    shutil.copy(wheel, place)
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple", asked
        server.shutdown()
        thread.join(TIMEOUT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        repeat("PIP_INDEX_URL", "{}"),
        repeat("UV_DEFAULT_INDEX", "{}"),
        repeat("UV_INDEX_URL", "{}"),
        ("UV_INDEX", "mine={}"),
    ],
)
def test_an_environment_without_pip_can_fetch(
    tmp_path: Path, index: Index, local_index: tuple[str, list[str]], name: str, value: str
) -> None:
    index("closed port")
    url, asked = local_index
    asked.clear()
    environ = {**os.environ, name: value.format(url), "PYTHONPATH": str(REPOSITORY)}
    if name != "UV_INDEX" and name != "PIP_INDEX_URL":
        del environ["PIP_INDEX_URL"]
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=TIMEOUT)
    source = (
        "import importlib.util, pathlib, sys; assert not importlib.util.find_spec('pip')\n"
        "from cpulaunch.ccl import build\n"
        "print(build._oneccl(pathlib.Path(sys.argv[1]), print, patient=False))"
    )
    done = subprocess.run(
        [venv / "bin" / "python", "-c", source, tmp_path],
        capture_output=True, text=True, timeout=TIMEOUT, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "oneccl-wheel" / "libccl.a").stat().st_size > 1e6
    assert any(path.endswith(".whl") for path in asked)


def test_without_pip_and_uv_the_error_names_the_packages_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ensurepip.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ensurepip", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr("sysconfig.get_config_var", {}.get)
    with pytest.raises(HostError, match="pip, which fetches oneccl-devel .*, is not installed") as caught:
        fetch._pip()
    assert "uv pip install pip" in str(caught.value.hint)


def test_a_wheel_with_another_digest_is_refused(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index("closed port")
    (tmp_path / "links").mkdir()
    name = f"oneccl_devel-{installed.ONECCL_VERSION}-py2.py3-none-manylinux_2_28_x86_64.whl"
    (tmp_path / "links" / name).write_bytes(b"PK")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in str(failure(tmp_path)[0])
