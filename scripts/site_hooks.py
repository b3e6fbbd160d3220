"""Hooks of mkdocs: pages outside of ``docs/``, and links to files that are not on the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository that are pages of the site, and the pages' names."""


def on_files(files: Any, config: Any) -> Any:
    for name, page in PAGES.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Redirect links to ``../CONTRIBUTING.md`` to its page, and keep only the text of links to other files
    outside."""
    for name, page in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{name}(#[^)]*)?\)", rf"]({page}\2)", markdown)
    return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)
