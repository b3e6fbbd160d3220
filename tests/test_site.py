"""The site: mkdocs builds it without a warning, and its four groups have all pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.command import REPOSITORY

pytestmark = pytest.mark.slow

GROUPS = ["Start", "Guides", "Reference", "Internals"]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    nav = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    assert [name for group in nav for name in group] == GROUPS
    pages = [
        page for group in nav for entries in group.values() for each in entries for page in each.values()
    ]
    for page in pages:
        place = tmp_path / page.removesuffix("index.md").removesuffix(".md")
        html = (place / "index.html").read_text()
        assert "<h1" in html, page
    assert {path.name for path in (REPOSITORY / "docs").glob("*.md")} <= set(pages)
    html = (tmp_path / "tutorial" / "index.html").read_text()
    assert "failed first" in html
    assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', html)  # it fetches nothing
