"""Settings whose values may be names of plug-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.packages import install

from cpulaunch.config.load import load
from cpulaunch.config.rank_settings import rank_setting
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import Table
from cpulaunch.errors import ConfigError
from cpulaunch.plugins import ENGINES, LAUNCHERS


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers a launcher and an engine, both called ``theirs``."""
    offered = {LAUNCHERS: "theirs = theirs:LAUNCHER", ENGINES: "theirs = theirs:ENGINE"}
    install(tmp_path, "theirs", "", offered)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("setting", [Table.launcher, Table.training.engine])
def test_the_name_of_a_plug_in_is_a_valid_value(setting: Setting[str]) -> None:
    assert load([(setting.key, "theirs", "--set")], environ={}).value(setting) == "theirs"


@pytest.mark.usefixtures("plugin")
def test_a_rank_reads_the_name_of_a_plug_in() -> None:
    assert rank_setting(Table.training.engine, {"CPULAUNCH_ENGINE": "theirs"}) == "theirs"


@pytest.mark.parametrize(("key", "group"), [("launcher", LAUNCHERS), ("training.engine", ENGINES)])
def test_the_error_of_an_unknown_name_lists_the_searched_places(key: str, group: str) -> None:
    with pytest.raises(ConfigError, match=f"'theirs' is not valid for {key}: .*entry point of {group}"):
        load([(key, "theirs", "--set")], environ={})
