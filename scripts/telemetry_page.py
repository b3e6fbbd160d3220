"""Write the tables of fields in docs/telemetry.md from `cpulaunch.telemetry`.

A test compares the page with the tables.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cpulaunch.telemetry import OF_PROCESSES, OF_STEPS, SUM, Field

PAGE = Path(__file__).parent.parent / "docs" / "telemetry.md"

PLACE = re.compile(r"(<!-- scripts/telemetry_page\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

OF_JOB = ("peak_flops", "flops_per_step", "ranks", "restarts")


def page() -> str:
    """Return the page's text with new tables; the rest is kept."""
    tables = {"steps": _steps(), "prometheus": _prometheus()}
    return PLACE.sub(lambda place: f"{place[1]}{tables[place[2]]}{place[3]}", PAGE.read_text())


def _steps() -> str:
    head = "| field | unit | of several steps | meaning |\n|---|---|---|---|\n"
    return head + "".join(
        f"| `{field.name}` | {field.unit or '–'} | {_adds_up(field)} | {field.about} |\n"
        for field in OF_STEPS
    )


def _adds_up(field: Field) -> str:
    return "sum" if field.adds_up == SUM else "last"


def _prometheus() -> str:
    sums = ["steps_total", *(field.counter for field in OF_STEPS if field.is_sum and field.counter)]
    latest = ["step", *(field.counter for field in OF_STEPS if not field.is_sum and field.counter)]
    programs = [field.counter for field in OF_PROCESSES]
    rows = (
        (sums, "each rank, since the job began, through restarts"),
        (latest, "each rank, latest"),
        (programs, "each rank's program"),
        (OF_JOB, "the job"),
    )
    head = "| metric | of |\n|---|---|\n"
    return head + "".join(
        f"| {', '.join(f'`cpulaunch_{n}`' for n in names)} | {of} |\n" for names, of in rows
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
