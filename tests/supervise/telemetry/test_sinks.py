"""Telemetry for Prometheus and TensorBoard, from real jobs."""

from __future__ import annotations

import http.client
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from support.command import TIMEOUT, Run
from support.jobs import job
from support.namespaces import until

from cpulaunch.config.kinds import Destinations, Sinks
from cpulaunch.report.numbers import Numbers
from cpulaunch.report.read import read_job
from cpulaunch.supervise.telemetry.sinks.prometheus import MAX_CLIENTS, Metrics, PrometheusSink
from cpulaunch.supervise.telemetry.sinks.tensorboard import Scalars

TRAINS = """\
import pathlib, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("ready", flush=True)
while not pathlib.Path("go").exists(): time.sleep(0.1)
"""

ROWS: list[dict[str, Any]] = [
    {"attempt": 0, "time": 0.0, "world_size": 2, "hosts": {"a": 1, 'b"\\': 1}},
    {"rank": 0, "step": 1, "time": 1.0, "seconds": 0.5, "waiting": 0.25, "samples": 4, "loss": 2.0},
    {"rank": 1, "step": 1, "time": 1.0, "seconds": 0.7, "waiting": 0.0, "samples": 4, "loss": 4.0},
    {"rank": 0, "step": 5, "steps": 4, "time": 3.0, "seconds": 2.0, "waiting": 1.0, "samples": 16},
    {"rank": 0, "time": 3.0, "rss": 2**30, "cpu_seconds": 7.5, "cycles": 9, "far_memory": 0.5},
    {"schema": 1, "peak_flops": 1e12, "flops_per_step": 3e11, "precision": "bf16"},
]


def scrape(port: int, path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def parsed(text: str) -> dict[tuple[str, str], float]:
    """Return the values of metrics, by name and rank."""
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (sample.name, sample.labels.get("rank", "")): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def events_of(directory: Path) -> list[tuple[str, int, float]]:
    """Return name, step and value of all scalars that TensorBoard reads in a directory."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(directory))
    read.Reload()
    names = read.Tags()["scalars"]
    return [(name, each.step, each.value) for name in names for each in read.Scalars(name)]


def test_rows_become_metrics_of_ranks() -> None:
    metrics = Metrics("job", ["localhost"])
    metrics.add(ROWS)
    text = metrics.text()
    found = parsed(text)
    assert found["cpulaunch_steps_total", "0"] == 5
    assert found["cpulaunch_step_seconds_total", "0"] == 2.5
    assert found["cpulaunch_waiting_seconds_total", "0"] == 1.25
    assert found["cpulaunch_samples_total", "1"] == 4
    assert found["cpulaunch_loss", "1"] == 4
    assert found["cpulaunch_step", "0"] == 5
    assert found["cpulaunch_resident_memory_bytes", "0"] == 2**30
    assert (found["cpulaunch_cycles_total", "0"], found["cpulaunch_far_memory_ratio", "0"]) == (9, 0.5)
    assert (found["cpulaunch_peak_flops", ""], found["cpulaunch_ranks", ""]) == (1e12, 2)
    assert 'cpulaunch_loss{job="job",rank="1",host="b\\"\\\\"} 4.0' in text


def test_a_steps_rows_become_scalars_of_the_job() -> None:
    scalars = Scalars(2)
    at_once = list(scalars.take(ROWS))
    assert at_once == [
        ("time/longest_of_a_rank", 0.7, 1),
        ("time/step", 0.6, 1),
        ("time/waiting", 0.125, 1),
        ("loss", 3.0, 1),
    ]
    rest = {name: value for name, value, _ in scalars.rest()}
    assert rest["throughput/samples_per_second"] == 16
    assert rest["MFU"] == 3e11 / 0.5 / 1e12
    assert rest["memory/largest_rank_in_GiB"] == 1
    assert list(scalars.rest()) == []


def test_the_first_step_of_an_attempt_has_no_rate() -> None:
    """Its time includes the start, even if the attempt resumes from a saved state."""
    scalars = Scalars(1)
    steps = [{"rank": 0, "step": n, "time": 1.0, "seconds": 0.5, "samples": 4} for n in (7, 8)]
    rows = [{"schema": 1, "peak_flops": 1e12, "flops_per_step": 3e11}, *steps, ROWS[0] | {"world_size": 1}]
    found = [(name, step) for name, _, step in scalars.take([*rows, *steps])]
    for name in ("throughput/samples_per_second", "MFU"):
        assert found.count((name, 7)) == 0
        assert found.count((name, 8)) == 2
    assert found.count(("time/step", 7)) == 2


def test_silent_ranks_keep_few_steps_waiting() -> None:
    scalars = Scalars(2)
    rows = [{"rank": 0, "step": step, "time": 1.0, "seconds": 0.5} for step in range(1000)]
    assert len({step for _, _, step in scalars.take(rows)}) > 900


def test_silent_clients_are_limited_and_delay_no_other() -> None:
    sink = PrometheusSink("127.0.0.1", 0, Metrics("job", ["a"]))
    try:
        sink.rows(ROWS)
        silent = [socket.create_connection(("127.0.0.1", sink.port), TIMEOUT) for _ in range(MAX_CLIENTS - 4)]
        assert scrape(sink.port)[0] == 200
        assert scrape(sink.port, "/etc/passwd")[0] == 404
        silent += [socket.create_connection(("127.0.0.1", sink.port), TIMEOUT) for _ in range(5)]
        assert silent[-1].recv(1) == b""  # one too many
        for each in silent:
            each.close()
    finally:
        assert sink.close(TIMEOUT)
    with pytest.raises(OSError):  # noqa: PT011
        socket.create_connection(("127.0.0.1", sink.port), TIMEOUT)


@pytest.mark.slow
def test_a_running_job_is_scraped_and_its_events_are_read(marked: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    port = free_port()
    with job(tmp_path, marked, ["--telemetry", f"tensorboard,prometheus:{port}"], TRAINS) as launcher:
        steps = [("cpulaunch_steps_total", rank) for rank in "01"]
        until(lambda: all(parsed(scrape(port)[1]).get(name) == 5 for name in steps), "all steps to be told")
        text = scrape(port)[1]
        assert (
            f'cpulaunch_step{{job="{next(tmp_path.glob("runs/*")).name}",rank="1",host="localhost"}} 5'
            in text
        )
        assert parsed(text)["cpulaunch_step_seconds_total", "0"] > 0
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0
    (place,) = tmp_path.glob("runs/*/tensorboard")
    events = events_of(place)
    assert sorted(step for name, step, _ in events if name == "time/step") == [1, 2, 3, 4, 5]
    assert all(value > 0 for name, _, value in events if name == "time/step")
    figures = {name: text for name, text, _ in Numbers(read_job(place.parent)).key_figures()}
    assert (figures["result"], figures["steps"]) == ("ok", "5")  # as in a report


def test_a_port_that_is_in_use_is_an_error_before_the_start(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = cpulaunch("run", "-n", "1", "--telemetry", f"prometheus:{port}", "x.py")
    assert done.returncode == 3
    assert f"--telemetry: port {port} of 127.0.0.1 is in use" in done.stderr


def test_without_the_package_the_error_names_it(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/tensorboardX.py").write_text("raise ImportError('hidden')")
    path = os.pathsep.join([str(tmp_path / "hidden"), os.environ.get("PYTHONPATH", "")])
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}  # nothing is built in this cache
    done = cpulaunch(
        "run", "-n", "1", "--telemetry", "tensorboard", "x.py", env={"PYTHONPATH": path, **cache}
    )
    assert done.returncode == 2
    assert not list(tmp_path.glob("runs/*"))
    assert "building" not in done.stderr
    assert "--telemetry tensorboard requires the package tensorboardX" in done.stderr


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("prometheus:9100", ("127.0.0.1", 9100)),
        ("prometheus:0.0.0.0:9100", ("0.0.0.0", 9100)),
        ("prometheus:[::1]:9100", ("::1", 9100)),
        ("tensorboard", None),
    ],
)
def test_prometheus_listens_on_loopback_by_default(text: str, place: tuple[str, int] | None) -> None:
    sinks = Destinations().from_text(text)
    assert sinks == Sinks(tensorboard=place is None, prometheus=place)
    assert str(sinks) == text


@pytest.mark.parametrize(
    "text",
    ["", "none,file", "prometheus", "prometheus:0", "prometheus:65536", "wandb", "tensorboard,tensorboard"],
)
def test_other_destinations_are_errors(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Destinations().from_text(text)
