"""``cpulaunch report``: files of real jobs, opened in a real browser."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.command import REPOSITORY, TIMEOUT, Run, clean_environment
from support.marks import repeat
from support.telemetry import JOB, SECRET, write_job

from cpulaunch.report.findings import in_words
from cpulaunch.report.numbers import Numbers
from cpulaunch.report.page import render
from cpulaunch.report.read import read_job
from cpulaunch.report.secrets import masked, masked_words
from cpulaunch.report.style import DARK as DARK_COLOURS
from cpulaunch.report.style import LIGHT, SERIES

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def opened(page: Path, profile: Path, *options: str) -> tuple[str, list[str]]:
    """Return the page's elements after its script has run, and the console's messages."""
    assert CHROMIUM
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=20000",
            "--window-size=1100,2600", "--dump-dom", *options, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=2 * TIMEOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


DARK = "--blink-settings=preferredColorScheme=0"


def figures_of(dom: str) -> dict[str, str]:
    """Return the SVG of each figure."""
    return dict(re.findall(r'<div class="figure[^"]*" id="(\w+)-\d+".*?(<svg.*?</svg>)', dom, re.S))


def marks_of(svg: str, label: str) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Return the values and attributes of the marks with ``label`` in their descriptions."""
    found = [dict(re.findall(r'([\w-]+)="([^"]*)"', tag)) for tag in re.findall(r"<(?:path|line)[^>]*>", svg)]
    values = [(re.split(r"; (?=[\w ]+: )", mark.get("aria-label", "")), mark) for mark in found]
    return [
        (dict(text.split(": ", 1) for text in texts), mark)
        for texts, mark in values
        if label in " ".join(texts)
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a restarted job of four ranks with a slow rank 1."""
    directory = tmp_path_factory.mktemp("report")
    write_job(directory / "runs", steps=300, restart_at=200)
    subprocess.run(
        [sys.executable, "-m", "cpulaunch", "report", "runs"], cwd=directory, env=clean_environment(),
        check=True, timeout=TIMEOUT, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return directory / "report.html"


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize(("theme", "options"), [repeat("light", ()), ("dark", (DARK,))])
def test_a_report_draws_the_jobs_figures_in_the_browsers_theme(
    report: Path, tmp_path: Path, theme: str, options: tuple[str, ...]
) -> None:
    dom, console = opened(report, tmp_path / "profile", *options)
    assert console == []
    assert f'data-drawn="{theme}"' in dom
    drawn = figures_of(dom)
    assert list(drawn) == ["throughput", "heat", "share", "mfu", "loss", "memory"]
    for text in ("train.py --lr 0.1", "rank 1 (+1", "rank 1 got SIGKILL", "25-31", "cpulaunch.yaml:9"):
        assert text in dom

    series = SERIES[theme]
    bars = marks_of(drawn["share"], "part: ")
    widths = {
        (values["rank"], values["part"]): float(mark["d"].split("h")[1].split("v")[0])
        for values, mark in bars
    }
    assert len(widths) == 4 * 5
    whole = {rank: sum(width for (of, _), width in widths.items() if of == rank) for rank in "0123"}
    assert max(whole.values()) - min(whole.values()) < 1  # each rank's parts make 100 %
    for values, mark in bars:
        share = float(values["share"].rstrip("%")) / 100
        assert widths[values["rank"], values["part"]] / whole[values["rank"]] == pytest.approx(
            share, abs=0.002
        )
        assert mark["fill"] == series[int(values["order"])]
    assert widths["1", "waiting for slower ranks"] == 0 < widths["0", "waiting for slower ranks"]

    cells = marks_of(drawn["heat"], "ms: ")
    assert len(cells) > 4 * 100
    light = {rank: [sum(map(int, re.findall(r"\d+", mark["fill"]))) for values, mark in cells if values["rank"] == rank]
             for rank in "0123"}  # fmt: skip
    middle = {rank: sorted(sums)[len(sums) // 2] for rank, sums in light.items()}
    others = [middle[rank] for rank in "023"]
    assert middle["1"] < min(others) - 100 if theme == "light" else middle["1"] > max(others) + 100

    colours = {"light": LIGHT, "dark": DARK_COLOURS}[theme]
    for kind, colour in (("failure", "bad"), ("stall", "stall"), ("restart", "restart")):
        assert [mark["stroke"] for _, mark in marks_of(drawn["loss"], f"{kind}: ")] == [colours[colour]]
    curves = [mark for _, mark in marks_of(drawn["throughput"], "name: all ranks")]
    (points,) = [re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", mark["d"]) for mark in curves]
    assert len(points) > 100
    heights = sorted(float(y) for _, y in points)
    assert heights[len(heights) // 2] == pytest.approx(200 * (1 - 190 / 200), abs=2)  # 190,000 of 200,000
    assert [mark["stroke"] for mark in curves] == [series[0]]


@needs_chromium
@pytest.mark.repeats
def test_a_report_has_the_browsers_colours(report: Path, tmp_path: Path) -> None:
    """The test reads the pixels of a screenshot, not only the elements."""
    images = pytest.importorskip("PIL.Image")
    for theme, options in (("light", ()), ("dark", (DARK,))):
        shot = tmp_path / f"{theme}.png"
        opened(report, tmp_path / "profile", "--hide-scrollbars", f"--screenshot={shot}", *options)
        image = images.open(shot).convert("RGB")
        counts = {f"#{r:02x}{g:02x}{b:02x}": n for n, (r, g, b) in image.getcolors(1 << 24)}
        page = {"light": LIGHT, "dark": DARK_COLOURS}[theme]
        assert image.getpixel((2, 2)) == images.new("RGB", (1, 1), page["paper"]).getpixel((0, 0))
        for colour in SERIES[theme][:5]:
            assert counts.get(colour, 0) > 500, colour  # the bars of the shares
        assert counts.get(page["bad"], 0) > 100  # the lines that mark the failure


@needs_chromium
@pytest.mark.slow
def test_two_jobs_are_compared(cpulaunch: Run, tmp_path: Path) -> None:
    write_job(tmp_path / "runs", steps=200)
    write_job(tmp_path / "runs", steps=200, step=0.042, job="20261123-061104-aaaaaaaaaaaaaaaa")
    (tmp_path / "both.html").write_text("mine")
    for _ in range(2):  # the second one takes the place of the first
        assert cpulaunch("report", JOB, "20261123-061104-a", "-o", "both.html").returncode == 0
    assert [path.read_text() for path in tmp_path.glob("both.html.*")] == ["mine"]
    dom, console = opened(tmp_path / "both.html", tmp_path / "profile")
    assert console == []
    assert "(0.50×)" in dom  # a step
    assert re.search(r'id="throughput-0".*?A: 20261123-05.*?B: 20261123-06', dom, re.S)
    assert len(re.findall('<svg[^>]* class="marks"', dom)) == 7


@pytest.mark.slow
def test_a_long_job_makes_a_small_file_with_little_memory(tmp_path: Path) -> None:
    """The file and the memory don't grow with the number of steps."""
    place = write_job(tmp_path, ranks=16, steps=25_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    page = render([read_job(place)], "x" * 1_000_000, "test")
    assert 1_050_000 < len(page.encode()) < 2_500_000
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    )  # KiB; the rows take several times that


def test_a_report_contains_no_secret(tmp_path: Path) -> None:
    page = render([read_job(write_job(tmp_path))], "", "test")
    assert "--api-key … --hub https://…@hub.example" in page
    assert "HF_TOKEN=…" in page
    assert SECRET not in page
    assert "5ecret" not in page


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("lr=0.1 batch_size=32", "lr=0.1 batch_size=32"),
        ("HF_TOKEN=abc x", "HF_TOKEN=… x"),
        ("password: 'a b'", "password: …"),
        ("https://me:pass@host/x", "https://…@host/x"),
        ("at hf_AbCdEfGhIjKlMnOpQrStUvWxYz", "at …"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ012345", "…"),
        ("0123456789abcdef0123456789abcdef", "…"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_1", "…"),
        ("runs/20261123-051104-77a5194ce8b06d3f", "runs/20261123-051104-77a5194ce8b06d3f"),
        ("max_tokens 4096", "max_tokens 4096"),
    ],
)
def test_secrets_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_values_of_options_with_secret_names_are_masked() -> None:
    assert masked_words(["--token", "abc", "--lr", "0.1", "--password=x", "--auth", "--fast"]) == [
        "--token", "…", "--lr", "0.1", "--password=…", "--auth", "--fast",
    ]  # fmt: skip


def test_output_of_jobs_is_escaped_in_html(tmp_path: Path) -> None:
    place = write_job(tmp_path, job="<b>job")
    (place / "trace.txt").write_text("</script><script>alert(1)</script>")
    page = render([read_job(place)], "", "test")
    assert "<b>job" not in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_comparison_keeps_a_jobs_colour_and_shows_its_trace(tmp_path: Path) -> None:
    """Only one of the jobs has logged a loss, and only one was traced."""
    first = write_job(tmp_path / "a")
    rows = [json.loads(line) for line in (first / "telemetry.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**row, "loss": None}) + "\n" for row in rows)
    (first / "telemetry.jsonl").write_text(text)
    second = write_job(tmp_path / "b", job="20261123-061104-aaaaaaaaaaaaaaaa")
    long = "  9 % in the optimizer: " + "fused=True " * 20
    (second / "trace.txt").write_text(f"{long}\n\n  computation     1 %        1 %\n")
    page = render([read_job(first), read_job(second)], "", "test")
    assert page.count(">Trace<") == 1
    assert f'<span class="words">{long}</span>' in page
    assert "\n  computation     1 %        1 %\n" in page  # a line of a table isn't wrapped
    specs = json.loads(page.split("const SPECS=")[1].split(",THEMES=")[0])
    curves = [spec["layer"][0]["encoding"] for name, spec in specs.items() if name[:4] in ("thro", "step")]
    begin, end = curves[0]["x"]["scale"]["domain"]
    assert 2 < begin < 3.2 < end  # the first step ends after 3.1 s: nothing is drawn before
    assert curves[1]["x"] == curves[0]["x"]
    (loss,) = [spec for name, spec in specs.items() if name.startswith("loss")]
    colour = loss["layer"][0]["encoding"]["color"]
    a, b = f"A: {JOB}", "B: 20261123-061104-aaaaaaaaaaaaaaaa"
    assert colour["scale"] == {"domain": [a, b]}
    assert colour["legend"]["values"] == [b]
    assert {value["name"] for value in loss["layer"][0]["data"]["values"]} == {b}


def test_events_are_in_order(tmp_path: Path) -> None:
    marks = read_job(write_job(tmp_path, steps=300, restart_at=100)).marks
    assert [(mark.kind, mark.text[:20]) for mark in marks] == [
        ("failure", "rank 1 got SIGKILL"), ("restart", "restart 1"), ("stall", "no progress for 60 s"),
    ]  # fmt: skip


def test_a_failed_job_has_the_reason(tmp_path: Path) -> None:
    outcome = json.loads((path := write_job(tmp_path) / "outcome.json").read_text())
    failure = {"rank": 1, "host": "node0", "signal": 9}
    path.write_text(json.dumps({**outcome, "exit_code": 137, "kind": "signal", "first_failure": failure}))
    assert re.search(r"^  reason +rank 1 on node0", in_words(Numbers(read_job(path.parent))), re.M)


def test_a_job_with_few_files_has_a_report(tmp_path: Path) -> None:
    (place := tmp_path / "job").mkdir()
    assert "no end is known" in render([read_job(place)], "", "test")
    for name in ("plan.json", "outcome.json"):
        (place / name).write_text('{"ranks": 7, "hosts": [1, {}], "settings": [{}], "kind": "ok"}')
    assert "There is no telemetry of this job" in render([read_job(place)], "", "test")


def test_a_report_without_vegas_scripts_has_findings_and_a_remedy(tmp_path: Path) -> None:
    """An installation may fail to fetch them.  The test uses a copy of the package without the scripts."""
    write_job(tmp_path / "runs")
    without = shutil.ignore_patterns("vega", "__pycache__")
    shutil.copytree(REPOSITORY / "cpulaunch", tmp_path / "cpulaunch", ignore=without)
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "report", "runs"], cwd=tmp_path, env=clean_environment(),
        capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 2
    assert "installed without Vega" in done.stderr
    assert "scripts/wheel/backend.py" in done.stderr
    figures, stands_out = done.stdout.split("\nwhat stands out\n")
    assert figures.splitlines()[0] == f"{JOB} (2 hosts, 4 ranks)"
    assert re.search(r"^  MFU +3\d %$", figures, re.M)
    assert re.match(
        r"  1\d % of the others' time waiting for slower ranks: rank 1 on node0 takes 8", stands_out
    )


FIGURES = [
    {"name": "throughput", "unit": "samples/s", "ranks": 4, "values": 4, "total": 203520.4, "mean": 50880.1,
     "median": 50880, "p99": 50900, "least": 50000, "most": 51000},
    {"name": "<b>latency", "unit": "ms", "ranks": 4, "values": 400, "total": None, "mean": 0.06,
     "median": 0.0584, "p99": 0.1173, "least": 0.05, "most": 1.6},
    {"name": "broken", "unit": "ms", "ranks": 4, "values": 1, "total": None, "mean": float("nan"),
     "median": 10**400, "p99": "x", "least": 0, "most": 0},
    "none",
]  # fmt: skip


def with_figures(place: Path, figures: Sequence[object] = FIGURES) -> Path:
    outcome = json.loads((place / "outcome.json").read_text())
    (place / "outcome.json").write_text(json.dumps({**outcome, "metrics": figures}))
    return place


def test_metrics_of_programs_are_shown_as_a_table(tmp_path: Path) -> None:
    one = with_figures(write_job(tmp_path / "a"))
    page = render([read_job(one)], "", "test")
    table = page.split("Metrics that the ranks printed")[1].partition("</table>")[0]
    rows = [re.findall("<t[dh]>([^<]*)", row) for row in table.split("<tr>")[1:]]
    assert rows == [
        ["figure", "what counts", "median", "99th percentile", "mean", "least", "most", "values", "ranks"],
        ["throughput", "203,520 samples/s (in all)", "50,880", "50,900", "50,880", "50,000", "51,000", "4", "4"],
        ["&lt;b&gt;latency", "0.0584 ms (median)", "0.0584", "0.1173", "0.06", "0.05", "1.6", "400", "4"],
    ]  # fmt: skip
    two = write_job(tmp_path / "b", job="20261123-061104-aaaaaaaaaaaaaaaa")
    page = render([read_job(one), read_job(with_figures(two))], "", "test")
    name = "throughput, as printed (in all)"
    assert f"<td>{name}</td><td>203,520 samples/s</td><td>203,520 samples/s (1.00×)" in page
    assert page.count("Metrics that the ranks printed") == 2


def test_a_terminal_shows_a_few_metrics_of_programs(tmp_path: Path) -> None:
    one = with_figures(write_job(tmp_path / "a"), FIGURES * 5)
    lines = [line for line in in_words(Numbers(read_job(one))).splitlines() if "as printed" in line]
    assert [" ".join(line.split()) for line in lines[:2]] == [
        "throughput, as printed (in all) 203,520 samples/s",
        "<b>latency, as printed (median) 0.0584 ms",
    ]
    assert (len(lines), lines[-1].split("printed")[1].split()) == (9, ["2", "more:", "outcome.json"])
