"""Renders jobs as an HTML page that needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

from cpulaunch.config.settings import Table
from cpulaunch.model.names import INSTANCE
from cpulaunch.report import figures
from cpulaunch.report.figures import Spec, TimeAxis
from cpulaunch.report.findings import findings
from cpulaunch.report.numbers import Numbers, result, size
from cpulaunch.report.read import Job, Rank
from cpulaunch.report.style import SCRIPT, STYLE, THEMES
from cpulaunch.supervise.job.status import duration
from cpulaunch.supervise.telemetry.metrics import headline_figure, number_text, with_unit
from cpulaunch.wording import EXPOSED, HIDDEN, INPUT, OFF_CPU, SLOWER_RANKS

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"
)
"""Content-Security-Policy, which blocks the network.  Vega needs ``unsafe-eval`` to compile expressions."""

SHARES = (EXPOSED, HIDDEN, INPUT, OFF_CPU, SLOWER_RANKS)
"""Key figures that are shares of time."""

COMPARED = 0.05
"""Minimum share whose ratio to another job's is shown; ratios of smaller shares are noise."""

NO_CARDS = ("result", "reason", HIDDEN)
"""Key figures without a card: the result is in the header, and hidden communication costs nothing."""

MAX_HOSTS = 64
"""Maximum number of listed hosts."""

WIDEST_TABLE = 140
"""Maximum characters of a line that is not wrapped; lines of tables have no more."""

MAX_METRICS = 100
"""Maximum number of listed metrics of programs."""

MAX_MARKS = 50
"""Maximum number of listed failures, stalls and restarts."""


class Page:
    """The parts of a page, and the figures that its script draws."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.specs: dict[str, Spec] = {}

    def add(self, html: str) -> None:
        """Add HTML as it is."""
        self.parts.append(html)

    def section(self, title: str, html: str) -> None:
        """Add HTML with a title."""
        self.add(f"<section><h2>{escape(title)}</h2>{html}</section>")

    def figure(self, name: str, title: str, spec: Spec | None, explanation: str = "") -> None:
        """Add a figure with a title and an explanation, unless ``spec`` is None."""
        if spec is None:
            return
        name = f"{name}-{len(self.specs)}"
        self.specs[name] = spec
        text = f"<p>{escape(explanation)}</p>" if explanation else ""
        self.section(title, f'{text}<div class="figure" id="{name}"></div>')


BEGINS = '<!doctype html><html lang="en"><head><meta name="generator" content="cpulaunch">'
"""First characters of each page."""


def render(jobs: Sequence[Job], bundle: str, made_by: str) -> str:
    """Return the HTML page about a job, or the comparison of several jobs.

    ``bundle`` is JavaScript that defines ``vegaEmbed``; ``made_by`` is the footer.
    """
    page, several = Page(), [Numbers(job) for job in jobs]
    if len(several) == 1:
        _one(page, several[0])
    else:
        _compared(page, several)
    title = " and ".join(job.name for job in jobs)
    specs = json.dumps(page.specs, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    themes = json.dumps(THEMES, separators=(",", ":"))
    return (
        f'{BEGINS}<meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}</style></head><body><main>'
        f"{''.join(page.parts)}<footer>{escape(made_by)}</footer></main>"
        f"<script>{bundle.replace('</script', '<' + chr(92) + '/script')}</script>"
        f"<script>const SPECS={specs},THEMES={themes};{SCRIPT}</script></body></html>\n"
    )


def _one(page: Page, numbers: Numbers) -> None:
    job = numbers.job
    page.add(_header(numbers))
    _findings(page, numbers)
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
        for name, text, _ in numbers.key_figures()
        if name not in NO_CARDS
    )
    page.add(f'<dl class="cards">{cards}</dl>')
    has_metrics = bool(job.end and job.end.metrics)
    if not job.buckets.last_step and not has_metrics and job.setting(Table.watch.telemetry) != "none":
        page.add('<p class="empty">There is no telemetry of this job: no step was recorded.</p>')
    _marks(page, job)
    _metrics(page, job)
    _figures(page, numbers)
    _trace(page, job)
    _placement(page, job)
    _settings(page, [job])


def _compared(page: Page, several: Sequence[Numbers]) -> None:
    names = _names([numbers.job for numbers in several])
    page.add(f"<header><h1>{escape(' and '.join(names))}</h1></header>")
    _table(page, several, names)
    axis = TimeAxis(
        max(numbers.longest for numbers in several), min(numbers.first_step for numbers in several)
    )
    if len({numbers.work for numbers in several}) == 1:
        unit = several[0].work[1]
        lines = [(name, each, each.throughput) for name, each in zip(names, several, strict=True)]
        page.figure("throughput", "Throughput", figures.over_time(lines, unit, axis))
    steps = [(name, each, 1000 * each.step_seconds) for name, each in zip(names, several, strict=True)]
    page.figure("steps", "Time of a step", figures.over_time(steps, "ms", axis))
    losses = [(name, n, loss) for name, n in zip(names, several, strict=True) if (loss := n.loss) is not None]
    page.figure("loss", "Loss", figures.over_time(losses, "loss", axis, zero=False, names=names))
    for name, numbers in zip(names, several, strict=True):
        page.add(f"<h1>{escape(name)}</h1>")
        _findings(page, numbers)
        _marks(page, numbers.job)
        _metrics(page, numbers.job)
        page.figure("heat", *_heat(numbers, TimeAxis(numbers.longest)))
        page.figure("share", *_share(numbers))
        _trace(page, numbers.job)
        _placement(page, numbers.job)
    _settings(page, [numbers.job for numbers in several], names)


def _header(numbers: Numbers) -> str:
    job = numbers.job
    state = result(job)
    tone = {"ok": "good", "running": "neutral", "interrupted": "neutral"}.get(state, "bad")
    return (
        f'<header><p class="job">{escape(job.name)}</p><h1>{escape(job.program or job.name)}</h1>'
        f'<p><span class="state {tone}">{escape(state)}</span> {escape(_context(job))}</p></header>'
    )


def _context(job: Job) -> str:
    """Return size, launcher, backend and precision of a job, in one line."""
    values = {key: value for key, value, _ in job.settings}
    backend = None if job.names.noun == INSTANCE else values.get("training.backend")
    precision = job.head.get("precision")
    precision = precision or values.get("training.precision")
    transport = f"{backend} over {job.transport}" if backend and job.transport else backend
    return " · ".join(filter(None, (size(job), values.get("launcher"), transport, precision)))


def _findings(page: Page, numbers: Numbers) -> None:
    if found := findings(numbers):
        items = "".join(f"<li>{escape(each.text)}</li>" for each in found)
        page.section("What stands out", f'<ol class="findings">{items}</ol>')


def _figures(page: Page, numbers: Numbers) -> None:
    axis = TimeAxis(numbers.longest)
    unit, noun = numbers.work[1], numbers.job.names.noun
    page.figure(
        "throughput", "Throughput",
        figures.over_time([(f"all {noun}s", numbers, numbers.throughput)], unit, axis),
        f"All {noun}s together, during their steps. Lines mark failures, stalls and restarts.",
    )  # fmt: skip
    page.figure("heat", *_heat(numbers, axis))
    page.figure("share", *_share(numbers))
    if (mfu := numbers.mfu) is not None:
        peak, flops = numbers.job.head["peak_flops"], numbers.job.head["flops_per_step"]
        says = (
            f"Model FLOPs of a step ({flops:.3g}) ÷ its time ÷ the measured peak of the {noun}s' cores "
            f"({peak / 1e12:.3g} TFLOP/s)."
        )
        lines = [("MFU", numbers, 100 * mfu)]
        page.figure("mfu", "Model FLOPs utilization", figures.over_time(lines, "%", axis), says)
    if (loss := numbers.loss) is not None:
        page.figure("loss", "Loss", figures.over_time([("loss", numbers, loss)], "loss", axis, zero=False))
    page.figure(
        "memory", "Memory", figures.memory(numbers, axis), f"Resident memory of the {noun}s' programs."
    )


def _heat(numbers: Numbers, axis: TimeAxis) -> tuple[str, Spec | None, str]:
    names = numbers.job.names
    title = f"Each {names.noun}'s own time per step" if numbers.knows_waiting else "Time of a step"
    without = "Time in which it waited for others is subtracted. " if numbers.knows_waiting else ""
    says = (
        f"{without}A row that stands out is a slow {names.noun}; a column is a moment in which all were slow."
    )
    if (slowest := numbers.slowest) is not None:
        slow = names.one(slowest[0]).capitalize()
        says += f" {slow} takes {100 * slowest[1]:.0f} % longer than the others."
    return title, figures.heat_map(numbers, axis), says


def _share(numbers: Numbers) -> tuple[str, Spec | None, str]:
    noun, says = numbers.job.names.noun, "Shares of the time of its steps."
    if noun != INSTANCE:
        says += " The rank that waits least is assumed to arrive last; the others also wait for it."
    return f"How each {noun} spends its time", figures.shares(numbers), says


def _marks(page: Page, job: Job) -> None:
    if not job.marks:
        return
    items = "".join(
        f'<li class="{mark.kind}"><b>{escape(mark.kind)}</b> after {duration(mark.seconds)}: '
        f"{escape(mark.text)}</li>"
        for mark in job.marks[:MAX_MARKS]
    )
    more = len(job.marks) - MAX_MARKS
    rest = f"<li>and {more} more: events.jsonl</li>" if more > 0 else ""
    page.section("What happened", f'<ul class="marks">{items}{rest}</ul>')


def _metrics(page: Page, job: Job) -> None:
    """Add a table of metrics that the job's programs have printed."""
    if not job.end or not job.end.metrics:
        return
    metrics, noun = job.end.metrics, job.names.noun
    rows = []
    for metric in metrics[:MAX_METRICS]:
        what, value = headline_figure(metric)
        rest = (metric.median, metric.p99, metric.mean, metric.least, metric.most)
        texts = (*map(number_text, rest), f"{metric.values:,}", metric.ranks)
        rows.append((metric.name, f"{with_unit(value, metric)} ({what})", *texts))
    columns = ("figure", "what counts", "median", "99th percentile", "mean", "least", "most", "values")
    head = f"<tr>{''.join(f'<th>{column}' for column in (*columns, f'{noun}s'))}</tr>"
    more = f"<p>and {len(metrics) - MAX_METRICS} more: outcome.json</p>" if len(metrics) > MAX_METRICS else ""
    table = f'<div class="wide"><table>{head}{_rows(rows)}</table></div>{more}'
    page.section(f"Metrics that the {noun}s printed", table)


def _trace(page: Page, job: Job) -> None:
    """Add the summaries of traces, and wrap long lines."""
    if job.trace:
        lines = (
            escape(line) if len(line) <= WIDEST_TABLE else f'<span class="words">{escape(line)}</span>'
            for line in job.trace.split("\n")
        )
        page.section("Trace", f"<pre>{chr(10).join(lines)}</pre>")


def _placement(page: Page, job: Job) -> None:
    if not job.ranks:
        return
    hosts = [(host, list(ranks)) for host, ranks in groupby(job.ranks, key=lambda rank: rank.host)]
    rows = "".join(
        _row(job.names.number(rank.rank), rank) for _, ranks in hosts[:MAX_HOSTS] for rank in ranks
    )
    more = f"<p>and {len(hosts) - MAX_HOSTS} more hosts</p>" if len(hosts) > MAX_HOSTS else ""
    columns = (job.names.noun, "host", "cores", "cores for communication", "NUMA nodes", "threads")
    head = f"<tr>{''.join(f'<th>{column}' for column in columns)}</tr>"
    table = f'<div class="wide"><table>{head}{rows}</table></div>{more}'
    page.section("Placement", table)


def _row(number: int, rank: Rank) -> str:
    texts = (number, rank.host, rank.cores, rank.comm_cores or "–", rank.numa_nodes, rank.threads)
    return f"<tr>{''.join(f'<td>{escape(str(text))}</td>' for text in texts)}</tr>"


def _settings(page: Page, jobs: Sequence[Job], names: Sequence[str] = ()) -> None:
    """Add a job's settings with their origins, or the settings in which several jobs differ."""
    if len(jobs) == 1:
        rows = jobs[0].settings
        chosen = [row for row in rows if row[2] != "default"]
        rest = [row for row in rows if row[2] == "default"]
        head = "<tr><th>setting<th>value<th>from</tr>"
        html = f'<div class="wide"><table>{head}{_rows(chosen)}</table></div>'
        html += (
            f"<details><summary>{len(rest)} defaults</summary><table>{head}{_rows(rest)}</table></details>"
        )
        page.section("Settings", html)
        return
    values = [{key: value for key, value, _ in job.settings} for job in jobs]
    keys = dict.fromkeys(key for each in values for key in each)
    lines = [(key, *(each.get(key, "–") for each in values)) for key in keys]
    different = [line for line in lines if len(set(line[1:])) > 1]
    head = f"<tr><th>setting{''.join(f'<th>{escape(name)}' for name in names)}</tr>"
    html = f'<div class="wide"><table>{head}{_rows(different)}</table></div>'
    page.section("Settings that differ", html if different else "<p>None.</p>")


def _rows(rows: Sequence[Sequence[Any]]) -> str:
    return "".join(f"<tr>{''.join(f'<td>{escape(str(text))}</td>' for text in row)}</tr>" for row in rows)


def _table(page: Page, several: Sequence[Numbers], names: Sequence[str]) -> None:
    """Add key figures side by side, with their ratios to the first job's."""
    figures_of = [{name: (text, number) for name, text, number in each.key_figures()} for each in several]
    keys = dict.fromkeys(name for each in figures_of for name in each)
    rows = [
        ("program", *(numbers.job.program for numbers in several)),
        ("ran on", *(size(numbers.job) for numbers in several)),
        *((key, *_cells(key, figures_of)) for key in keys),
    ]
    head = f"<tr><th>{''.join(f'<th>{escape(name)}' for name in names)}</tr>"
    page.section(
        "Side by side", f'<div class="wide"><table class="figures">{head}{_rows(rows)}</table></div>'
    )


def _cells(key: str, figures_of: Sequence[dict[str, tuple[str, float | None]]]) -> Iterator[str]:
    first = figures_of[0].get(key, ("", None))[1]
    for place, each in enumerate(figures_of):
        text, number = each.get(key, ("–", None))
        noise = key in SHARES and max(number or 0.0, first or 0.0) < COMPARED
        ratio = f" ({number / first:.2f}×)" if place and number and first and not noise else ""
        yield text + ratio


def _names(jobs: Sequence[Job]) -> list[str]:
    """Return distinct names for the jobs: a letter with the id, such as ``A: 20260101-120000-…``."""
    letters = (chr(ord("A") + place) if place < 26 else str(place) for place in range(len(jobs)))
    return [f"{letter}: {job.name}" for letter, job in zip(letters, jobs, strict=True)]
