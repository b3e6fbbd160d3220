"""A sink that Prometheus can scrape: ``--telemetry prometheus:9100`` (docs/telemetry.md)."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cpulaunch.errors import HostError
from cpulaunch.supervise.telemetry.rows import Row
from cpulaunch.telemetry import LAST, OF_PROCESSES, OF_STEPS, SUM, Field

PATIENCE = 5.0
"""Timeout of a client's connection in seconds, for the request and for the response."""

POLL = 0.1
"""Seconds between the server's checks for a shutdown, which may delay the end of the job."""

MAX_CLIENTS = 16
"""Maximum number of simultaneous clients; further connections are closed."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STEPS = Field("steps", "", SUM, "Optimizer steps that were made", "steps_total")
_STEP = Field("step", "", LAST, "The optimizer step that was made last", "step")

_ADDED = (_STEPS, *(field for field in OF_STEPS if field.is_sum))
_LATEST = (_STEP, *(field for field in OF_STEPS if not field.is_sum), *OF_PROCESSES)
"""Fields whose latest value is reported.  Sums in ``OF_PROCESSES`` count from the start of the process."""


class Metrics:
    """Aggregates rows into metrics in Prometheus' text format.  Pure."""

    def __init__(self, job: str, hosts: Sequence[str]) -> None:
        """``job`` is the job's id; ``hosts`` has the host of each rank."""
        self._job, self._hosts = job, list(hosts)
        self._totals: dict[str, dict[int, float]] = {}
        self._latest: dict[str, dict[int, float]] = {}
        self._head: Row = {}
        self._restarts = 0

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if "schema" in row:
                self._head |= row
            elif "attempt" in row:
                self._restarts = row["attempt"]
                self._hosts = [host for host, count in row.get("hosts", {}).items() for _ in range(count)]
            elif "step" in row:
                self._add_step(row)
            else:
                self._keep(row)

    def text(self) -> str:
        lines = list(self._of_job())
        for fields, known in ((_ADDED, self._totals), (_LATEST, self._latest)):
            for field in fields:
                lines += self._family(field, known.get(field.name, {}))
        return "\n".join(lines) + "\n"

    def _add_step(self, row: Row) -> None:
        rank = row["rank"]
        for field in _ADDED:
            if (value := row.get(field.name, 1 if field is _STEPS else None)) is not None:
                totals = self._totals.setdefault(field.name, {})
                totals[rank] = totals.get(rank, 0.0) + value
        self._keep(row)

    def _keep(self, row: Row) -> None:
        for field in _LATEST:
            if (value := row.get(field.name)) is not None:
                self._latest.setdefault(field.name, {})[row["rank"]] = value

    def _of_job(self) -> Iterator[str]:
        peak, flops = self._head.get("peak_flops"), self._head.get("flops_per_step")
        values = (
            ("peak_flops", "FLOP/s that the ranks' cores were measured to reach.", peak),
            ("flops_per_step", "FLOPs of the model in a step.", flops),
            ("restarts", "How often the job was started again.", self._restarts),
            ("ranks", "How many ranks the job has.", len(self._hosts)),
        )
        for name, what, value in values:
            if value is not None:
                yield from _heading(name, "gauge", what)
                yield f"cpulaunch_{name}{_labels({'job': self._job})} {value!r}"

    def _family(self, field: Field, values: Mapping[int, float]) -> Iterator[str]:
        name = field.counter
        if not values or not name:
            return
        what = field.about.partition(". ")[0] + "."
        yield from _heading(name, "counter" if field.is_sum else "gauge", what)
        for rank, value in sorted(values.items()):
            host = self._hosts[rank] if rank < len(self._hosts) else ""
            labels = _labels({"job": self._job, "rank": str(rank), "host": host})
            yield f"cpulaunch_{name}{labels} {value!r}"


class PrometheusSink:
    """Serves a job's metrics over HTTP at ``address`` and ``port``.

    Raises HostError if it cannot listen there.
    """

    def __init__(self, address: str, port: int, metrics: Metrics) -> None:
        self._metrics, self._lock = metrics, threading.Lock()
        try:
            self._server = _Server(address, port, self._text)
        except OSError as e:
            hint = "use another port, or an address of this host: --telemetry prometheus:127.0.0.1:9101"
            why = "is in use" if e.errno == errno.EADDRINUSE else f"can't be used: {e.strerror or e}"
            raise HostError(f"--telemetry: port {port} of {address} {why}", hint=hint) from None
        self.port = self._server.server_address[1]
        serve = partial(self._server.serve_forever, poll_interval=POLL)
        self._thread = threading.Thread(target=serve, name="prometheus", daemon=True)
        self._thread.start()

    def rows(self, rows: Sequence[Row]) -> None:
        with self._lock:
            self._metrics.add(rows)

    def close(self, patience: float) -> bool:
        self._server.shutdown()
        self._server.server_close()
        return True

    def _text(self) -> str:
        with self._lock:
            return self._metrics.text()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, port: int, text: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.text = text
        self._room = threading.BoundedSemaphore(MAX_CLIENTS)
        super().__init__((address, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a client in a new thread, or close the connection if there are ``MAX_CLIENTS``."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up or are too slow."""


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404)
            return
        body = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Return the ``Server`` header, without the version of Python."""
        return "cpulaunch"

    def log_message(self, *_: object) -> None:
        """Log nothing, because there would be a line for each scrape."""


def _heading(name: str, kind: str, what: str) -> Iterator[str]:
    yield f"# HELP cpulaunch_{name} {what}"
    yield f"# TYPE cpulaunch_{name} {kind}"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
