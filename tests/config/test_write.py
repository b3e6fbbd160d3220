"""Any settings that are written as YAML have the same values when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpulaunch.config.kinds import (
    Choice,
    Destinations,
    Every,
    Nodes,
    Number,
    Numbers,
    Ports,
    Seconds,
    Steps,
    Switch,
    Text,
    Variables,
    Words,
)
from cpulaunch.config.load import load
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SETTINGS
from cpulaunch.config.write import scalar, yaml_text

ANY_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def values_of(setting: Setting[Any]) -> st.SearchStrategy[Any]:
    kind = setting.kind
    if isinstance(kind, Switch):
        return st.booleans()
    if isinstance(kind, Choice):
        return st.sampled_from(kind.words)
    if isinstance(kind, Number):
        numbers: st.SearchStrategy[Any] = st.integers(kind.minimum, kind.maximum or 10**9)
        if isinstance(kind, Seconds):
            numbers |= st.floats(kind.minimum, 1e6).map(lambda n: int(n) if n == int(n) else n)
        return numbers | st.sampled_from(kind.words) if kind.words else numbers
    if isinstance(kind, Words):
        return st.lists(ANY_TEXT).map(tuple)
    if isinstance(kind, Variables):
        return st.dictionaries(ANY_TEXT.filter(lambda name: name and "=" not in name), ANY_TEXT)
    texts = {
        Nodes: ["all", "4", "3:4"],
        Every: ["auto", "90s", "10m", "2h", "1", "500"],
        Destinations: ["none", "file", "tensorboard", "tensorboard,prometheus:9100", "prometheus:[::1]:1"],
        Ports: ["auto", "20000-20099", "1024-65535"],
        Steps: ["none", "2", "10-14", "100000-100999"],
    }
    if isinstance(kind, Numbers):
        return st.sampled_from([*map(kind.from_text, (*kind.words, "0", "0-13,28", "0-6:2, 9"))])
    if type(kind) in texts:
        return st.sampled_from([*map(kind.from_text, texts[type(kind)])])
    assert isinstance(kind, Text)
    return ANY_TEXT.filter(str.strip)


@given(st.fixed_dictionaries({}, optional={setting: values_of(setting) for setting in SETTINGS.values()}))
def test_a_written_file_reads_back_the_same(values: dict[Setting[Any], Any]) -> None:
    config = load(file=Path("cpulaunch.yaml"), text=yaml_text(values), environ={})
    assert {setting: given.value for setting, given in config.given.items()} == values


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("auto", "auto"),
        ("hostfiles/four-nodes", "hostfiles/four-nodes"),
        ("no", '"no"'),
        ("0123", '"0123"'),
        ("a: b", '"a: b"'),
        ("a#b", '"a#b"'),
        ("", '""'),
        ("größer", '"größer"'),
        ("\x85\ufeff", '"\\u0085\\ufeff"'),
        (True, "true"),
        (4, "4"),
        (("-x", "a"), '["-x", a]'),
        ({"A": "1"}, '{A: "1"}'),
    ],
)
def test_scalars_are_quoted_only_if_yaml_would_misread_them(value: Any, text: str) -> None:
    assert scalar(value) == text


def test_every_default_is_shown_as_a_comment_that_is_valid_when_uncommented(tmp_path: Path) -> None:
    lines = yaml_text({}).splitlines()
    assert max(map(len, lines)) <= 80
    heading = lines.index("cpulaunch: 1")
    uncommented = [line.replace("# ", "", 1) if ": " in line else line for line in lines[heading + 1 :]]
    # The file shows three ways to name the hosts, which exclude each other.
    uncommented = [line for line in uncommented if not line.startswith("  list:")]
    config = load(file=Path("cpulaunch.yaml"), text="\n".join(["cpulaunch: 1", *uncommented]), environ={})
    unchanged = {key for key, setting in SETTINGS.items() if config.value(setting) == setting.default}
    assert set(SETTINGS) - unchanged == {"hosts.hostfile", "hosts.exclude"}
    assert (config.hosts.hostfile, config.hosts.exclude) == ("(none)", "(none)")


def test_the_wizards_questions_have_distinct_places_and_short_reasons() -> None:
    asked = [setting for setting in SETTINGS.values() if setting.ask]
    places = [setting.ask.place for setting in asked if setting.ask]
    assert len(set(places)) == len(places)
    assert all(len(setting.ask.why) <= 76 for setting in asked if setting.ask), "one line of 80 columns"
