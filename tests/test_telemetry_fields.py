"""The table of telemetry's fields, and the page, the ledger's size and the sums that follow from it."""

from __future__ import annotations

import runpy

from support.command import REPOSITORY

from cpulaunch import ledger
from cpulaunch.telemetry import OF_STEPS, added


def test_the_page_equals_the_tables() -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "telemetry_page.py"))
    page = (REPOSITORY / "docs" / "telemetry.md").read_text()
    assert script["page"]() == page, "run scripts/telemetry_page.py"


def test_the_ledger_has_space_for_all_steps() -> None:
    assert ledger.FIRST_STEP + ledger.STEPS * ledger.STEP.size <= ledger.REQUEST_AT
    assert ledger.STEP.size == 8 * (2 + len(OF_STEPS))


def test_sums_are_added_and_other_fields_keep_the_last_value() -> None:
    rows = [{"seconds": 0.1, "loss": 3.0}, {"seconds": 0.2, "tokens": 5, "loss": 2.0}, {"seconds": 0.3}]
    assert added(rows) == {"seconds": 0.6, "loss": 2.0, "tokens": 5}
