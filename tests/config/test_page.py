"""The reference page is made from the table, so it can't differ from it."""

from __future__ import annotations

import runpy

from support.command import REPOSITORY


def test_the_settings_page_is_up_to_date() -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "settings_page.py"))
    assert script["page"]() == (REPOSITORY / "docs" / "settings.md").read_text(), (
        "run scripts/settings_page.py"
    )
