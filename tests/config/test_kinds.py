"""Kinds of value that need more than a row in a table: names of plug-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpulaunch.config.load import load
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.errors import ConfigError


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers a launcher and an engine, both called ``theirs``."""
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[cpulaunch.launchers]\ntheirs = theirs:LAUNCHER\n\n[cpulaunch.engines]\ntheirs = theirs:ENGINE\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("key", ["launcher", "training.engine"])
def test_the_name_of_a_plug_in_is_a_value(key: str) -> None:
    assert load([(key, "theirs", "--set")], environ={})[key] == "theirs"


@pytest.mark.usefixtures("plugin")
def test_a_rank_reads_the_name_of_a_plug_in() -> None:
    assert rank_setting("training.engine", {"CPULAUNCH_ENGINE": "theirs"}) == "theirs"


@pytest.mark.parametrize(
    ("key", "group"), [("launcher", "cpulaunch.launchers"), ("training.engine", "cpulaunch.engines")]
)
def test_a_name_that_nothing_offers_is_refused_with_where_it_was_looked_for(key: str, group: str) -> None:
    with pytest.raises(ConfigError, match=f"'theirs' does not fit {key}: .*entry point of {group}"):
        load([(key, "theirs", "--set")], environ={})
