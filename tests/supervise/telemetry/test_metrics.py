"""Metrics that programs print to stdout, combined across all programs."""

from __future__ import annotations

import random
import statistics
import tracemalloc

import pytest

from cpulaunch.errors import UsageError
from cpulaunch.metric_line import MetricValue, metric_line, read_metric
from cpulaunch.supervise.job.outcome import Metric
from cpulaunch.supervise.telemetry.metrics import (
    MAX_ALL_VALUES,
    MAX_LINE,
    MAX_METRICS,
    MAX_VALUES,
    Metrics,
    metrics_table,
    number_text,
)


def found(*pieces: tuple[int, str]) -> Metrics:
    """Return the metrics after these pieces of the ranks' output, none of which has an invalid line."""
    metrics = Metrics()
    for rank, text in pieces:
        assert list(metrics.feed(rank, text.encode())) == []
    return metrics


def stated(name: str, *values: float, unit: str) -> str:
    return "".join(f"CPULAUNCH_METRIC {name}={value} {unit}\n" for value in values)


def only(metrics: Metrics) -> Metric:
    (metric,) = metrics.summary()
    return metric


@pytest.mark.parametrize(
    "unit", ["samples/s", "tokens/sec", "images per second", "/s", "GB/min", "img/S", "QPS"]
)
def test_a_rate_is_the_sum_of_all_ranks_means(unit: str) -> None:
    metric = only(found((0, stated("x", 100, 110, unit=unit)), (1, stated("x", 200, unit=unit))))
    assert (metric.total, metric.ranks, metric.values) == (305, 2, 3)
    assert metrics_table([metric], "instance") == (
        f"cpulaunch: x  305 {unit} in all (3 values of 2 instances, 100 to 200)\n"
    )


def test_the_median_and_percentile_of_a_time_are_over_all_values() -> None:
    chance = random.Random(0)
    values = [[chance.uniform(1, 20) for _ in range(500)] for _ in range(3)]
    metric = only(found(*((rank, stated("lat", *mine, unit="ms")) for rank, mine in enumerate(values))))
    every = sorted(value for mine in values for value in mine)
    assert metric.total is None
    assert metric.median == pytest.approx(statistics.median(every))
    assert metric.p99 == pytest.approx(statistics.quantiles(every, n=100, method="inclusive")[98])
    assert (metric.least, metric.most) == (pytest.approx(every[0]), pytest.approx(every[-1]))
    assert metrics_table([metric], "rank").startswith(f"cpulaunch: lat  median {metric.median:.4g} ms, 99th")


@pytest.mark.parametrize("unit", ["msec", "minutes", "μs", "µs", "Sec", "milliseconds"])
def test_times_have_many_names(unit: str) -> None:
    metric = only(found((0, stated("x", 1, 3, unit=unit))))
    assert metrics_table([metric], "rank").startswith(f"cpulaunch: x  median 2 {unit}, ")


@pytest.mark.parametrize(
    "text",
    [
        "50 %CPULAUNCH_METRIC p=3 ms\n",
        "\r60 %CPULAUNCH_METRIC p=3 ms\n",
        "CPULAUNCH_METRIC\tp=3\tms\r\n",
        "=" * 5000 + "CPULAUNCH_METRIC p=3 ms\n",
    ],
)
def test_earlier_output_on_the_line_does_not_matter(text: str) -> None:
    for size in (1, 5, len(text)):
        pieces = [(0, text[at : at + size]) for at in range(0, len(text), size)]
        assert only(found(*pieces)) == Metric("p", "ms", 1, 1, None, 3, 3, 3, 3, 3)


def test_words_with_the_same_beginning_are_not_metrics() -> None:
    assert found((0, "CPULAUNCH_METRICS x=1\nsee CPULAUNCH_METRIC name=value unit\n")).summary() == ()


def test_an_invalid_metric_is_reported_once_per_name_and_cause() -> None:
    metrics = Metrics()
    told = [
        said
        for number in range(30)
        for line in (f"loss=nan{number} ms", f"loss={number} a b", f"more=1e{400 + number}")
        for said in metrics.feed(0, f"CPULAUNCH_METRIC {line}\n".encode())
    ]
    assert [said.partition(": ")[2].partition(";")[0] for said in told] == [
        "its value is not a number",
        "a unit is one such as samples/s, images per second or ms",
        "a value must be finite, and at most 1e+100",
    ]


def test_other_metrics_are_averaged() -> None:
    metric = only(found((0, stated("accuracy", 90, unit="%")), (1, stated("accuracy", 94, unit="%"))))
    assert metrics_table([metric], "instance") == ("cpulaunch: accuracy  mean 92 % (2 instances, 90 to 94)\n")


def test_a_name_with_another_unit_is_another_metric() -> None:
    metrics = found((0, stated("x", 1, unit="s") + stated("x", 2, unit="ms") + "CPULAUNCH_METRIC x=3\n"))
    assert [(m.name, m.unit) for m in metrics.summary()] == [("x", "s"), ("x", "ms"), ("x", "")]


def test_lines_may_come_in_pieces_of_any_size_and_ranks_mixed() -> None:
    text = (
        "begin\n"
        + stated("x", 1, 2, unit="it/s")
        + "no CPULAUNCH_METRIC x=9 it/s or more of that kind\n"
        + stated("x", 6, unit="it/s")
    )
    for size in (1, 2, 7, 19, 40):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        metric = only(found(*((rank, piece) for piece in pieces for rank in (0, 1))))
        assert (metric.total, metric.values) == (6, 6)


def test_an_unfinished_line_counts_only_at_the_end_of_output() -> None:
    metrics = found((0, "50 %\rCPULAUNCH_METRIC x=1 it/s"))
    assert metrics.summary() == ()
    assert list(metrics.finish(0)) == []
    assert (only(metrics).total, list(metrics.finish(0))) == (1, [])


def test_an_invalid_unfinished_last_line_is_reported() -> None:
    (problem,) = found((0, "CPULAUNCH_METRIC x=fast")).finish(0)
    assert "its value is not a number" in problem
    assert list(found((0, "done")).finish(0)) == []


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "x=",
        "x=nan s",
        "x=1e101",
        "=1",
        "a b=1",
        "x=1 " + "u" * 33,
        "n" * 65 + "=1",
        "d=1 ms extra words",
    ],
)
def test_a_line_without_a_metric_is_reported(line: str) -> None:
    metrics = Metrics()
    (problem,) = metrics.feed(3, f"CPULAUNCH_METRIC {line}\n".encode())
    assert problem.startswith(" printed a metric that can't be read: ")
    assert f"; it was 'CPULAUNCH_METRIC {line[:20]}" in problem
    assert metrics.summary() == ()


def test_bytes_that_are_not_text_do_no_harm() -> None:
    metrics = Metrics()
    assert len(list(metrics.feed(0, b"CPULAUNCH_METRIC \xff=1 s\n\xff\x00\n"))) == 1
    assert metrics.summary() == ()


def test_many_names_and_long_lines_take_little_memory() -> None:
    metrics = Metrics()
    text = "".join(f"CPULAUNCH_METRIC m{n}=1 s\n" for n in range(MAX_METRICS + 1))
    assert len(list(metrics.feed(0, text.encode()))) == 1
    assert len(metrics.summary()) == MAX_METRICS
    for _ in range(100):
        assert list(metrics.feed(1, b"CPULAUNCH_METRIC " + b"x" * 10_000)) == []
    assert len(metrics._rest[1]) <= MAX_LINE + 1


def test_the_sample_is_not_biased_by_a_pattern_in_the_values() -> None:
    """Every second value is 100, and every 128th is 1000."""
    metrics = Metrics()
    for number in range(4 * MAX_VALUES + 4):
        value = 1000 if number % 128 == 0 else 100 if number % 2 else 1
        assert list(metrics.feed(0, b"CPULAUNCH_METRIC x=%d ms\n" % value)) == []
    sample = metrics._found["x", "ms"][0].sample
    assert sum(value == 1000 for value in sample) == pytest.approx(MAX_VALUES / 128, rel=0.2)
    assert sum(value == 100 for value in sample) == pytest.approx(MAX_VALUES / 2, rel=0.03)


def test_the_line_states_that_values_are_sampled_and_is_reproducible() -> None:
    def once() -> Metric:
        metrics = Metrics()
        for rank, count in ((0, MAX_VALUES + 8), (1, 8)):
            for value in range(count):
                assert list(metrics.feed(rank, b"CPULAUNCH_METRIC x=%d ms\n" % value)) == []
        return only(metrics)

    metric = once()
    assert metrics_table([metric], "instance").endswith(
        " (10,016 values of 2 instances, 0 to 10,007; percentiles of a sample of 10,008)\n"
    )
    assert once() == metric


def test_many_values_of_many_ranks_take_little_memory_at_the_end() -> None:
    """With a tuple for each value, 1,024 ranks with 10,000 each took a gigabyte for each metric."""
    ranks, count = 128, 4000
    metrics = Metrics()
    for rank in range(ranks):
        lines = b"".join(b"CPULAUNCH_METRIC x=%d ms\n" % (7919 * n % count) for n in range(count))
        assert list(metrics.feed(rank, lines)) == []
    tracemalloc.start()
    try:
        metric = only(metrics)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40e6
    assert (metric.values, metric.mean) == (ranks * count, (count - 1) / 2)
    assert (metric.least, metric.most) == (0, count - 1)
    assert metric.median == pytest.approx(count / 2, rel=0.02)
    assert metric.p99 == pytest.approx(0.99 * count, rel=0.002)
    assert metric.sample is not None
    assert metric.sample <= MAX_ALL_VALUES


def test_a_rank_with_few_values_has_a_proportional_weight() -> None:
    metrics = Metrics()
    for _ in range(4 * MAX_VALUES):
        assert list(metrics.feed(0, b"CPULAUNCH_METRIC x=1 ms\n")) == []
    for _ in range(MAX_VALUES // 50):  # half a per cent
        assert list(metrics.feed(1, b"CPULAUNCH_METRIC x=9 ms\n")) == []
    assert only(metrics).p99 == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(203520.4, "203,520"), (0.05841, "0.05841"), (123456789012345.0, "123,456,789,012,345"), (1e15, "1e+15"),
     (-1.23456e99, "-1.235e+99"), (0.0, "0")],
)  # fmt: skip
def test_numbers_have_few_digits(value: float, text: str) -> None:
    assert number_text(value) == text


class TestTheLine:
    @pytest.mark.parametrize(
        "one",
        [
            MetricValue("x", 1.0, ""),
            MetricValue("a.b/c:d@e_f-g%", -1.5e-7, "µs"),
            MetricValue("x", 3.0, "samples / s"),
        ],
    )
    def test_round_trips(self, one: MetricValue) -> None:
        assert read_metric(metric_line(one)) == one

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e101])
    def test_reports_a_value_that_is_not_a_number(self, value: float) -> None:
        (problem,) = Metrics().feed(0, metric_line(MetricValue("x", value, "ms")).encode() + b"\n")
        assert ": a value must be finite, and at most 1e+100; it was " in problem

    @pytest.mark.parametrize(
        ("one", "error"),
        [
            (MetricValue("a b", 1.0, ""), "'a b' can't be the name of a metric"),
            (MetricValue("", 1.0, ""), "'' can't be the name"),
            (MetricValue("x", 1.0, "a\nb"), "can't be the unit"),
        ],
    )
    def test_is_refused_if_it_could_not_be_read(self, one: MetricValue, error: str) -> None:
        with pytest.raises(UsageError, match=error):
            metric_line(one)
