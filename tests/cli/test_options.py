"""Options of the command line, which are generated from the table of settings, and forgotten commands."""

from __future__ import annotations

import argparse
import re

import pytest

from cpulaunch.cli.main import main
from cpulaunch.cli.options import _values
from cpulaunch.cli.run.command import run_parser
from cpulaunch.config.settings import SETTINGS
from cpulaunch.errors import UsageError


def help_of(option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The output of ``cpulaunch run OPTION`` on a terminal with 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["run", option])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_and_shows_common_options(capsys, monkeypatch) -> None:
    text = help_of("--help", capsys, monkeypatch)
    assert len(text.splitlines()) <= 120
    assert max(map(len, text.splitlines())) <= 80
    shown = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))
    for setting in SETTINGS.values():
        assert set(setting.flags) <= shown if setting.common else not shown & {*setting.flags}
    assert {"--help-all", "--dry-run", "--set"} <= shown
    assert "example" in text


def test_help_all_shows_the_options_of_all_settings(capsys, monkeypatch) -> None:
    text = help_of("--help-all", capsys, monkeypatch)
    for flag in [flag for setting in SETTINGS.values() for flag in setting.flags]:
        assert flag in text
    assert "--facts" in text


@pytest.mark.parametrize("option", ["--nproc_per_node", "-ppn"])
def test_options_may_be_written_with_underscores(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    assert main(["run", option, "1", "--dry-run", "--format", "json", "t.py", "--an_argument"]) == 0
    text = capsys.readouterr().out
    assert '"--an_argument"' in text  # the script's own arguments are unchanged
    assert '"key": "hosts.nproc_per_node",\n   "value": 1' in text


@pytest.mark.parametrize("option", ["-n", "-np"])
def test_the_number_of_ranks_can_be_given_as_with_mpirun(option: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    assert main(["run", option, "1", "--dry-run", "--format", "json", "t.py"]) == 0
    assert f'"key": "hosts.nproc",\n   "value": 1,\n   "origin": "{option}"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train.py", "--lr", "1"], "did you mean `cpulaunch run train.py --lr 1`?"),
        (["-n", "2", "train.py"], "options come after the command: cpulaunch run -n 2 train.py"),
        (["rnu"], "commands: run, "),
    ],
)
def test_a_forgotten_command_gives_a_hint(arguments: list[str], hint: str, capsys) -> None:
    assert main(arguments) == 2
    assert f"cpulaunch: hint: {hint}" in capsys.readouterr().err


TAKES_TEXT = sorted(
    action.option_strings[0]
    for action in run_parser()._actions
    if action.option_strings and action.help != argparse.SUPPRESS and _values(action) == 1
)


@pytest.mark.parametrize("option", TAKES_TEXT)
@pytest.mark.parametrize("word", ["--dry-run", "--", "-m", "--unheard-of"])
def test_an_option_is_not_taken_as_the_value_of_another_option(option: str, word: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{option} needs a value")) as raised:
        run_parser().split([option, word, "train.py"])
    assert "None" not in str(raised.value)
    assert raised.value.hint == f"if {word} is the value, join them by =: {option}={word}"


def test_a_forgotten_value_starts_no_job(script: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--log-dir", "--dry-run", "train.py"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "cpulaunch: error: --log-dir needs a value: DIR, and --dry-run looks like an option"
    assert hint == "cpulaunch: hint: if --dry-run is the value, join them by =: --log-dir=--dry-run"


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        (["--mpi-args=--oversubscribe"], "mpi.args", "--oversubscribe"),
        (["--mpi_args=-x"], "mpi.args", "-x"),
        (["-x=--a"], "forward", "--a"),
        (["--env", "A=-1"], "env", "A=-1"),
        (["-genv", "A", "-1"], "env", "A=-1"),
        (["-genv", "A=-O2"], "env", "A=-O2"),
        (["-n", "-1"], "hosts.nproc", "-1"),
    ],
)
def test_a_value_that_begins_with_a_dash_can_be_joined_by_an_equals_sign(
    words: list[str], key: str, text: str
) -> None:
    parser = run_parser()
    options, rest = parser.split([*words, "train.py"])
    assert rest == ["train.py"]
    assert [given[:2] for given in parser.parse_args(options).given] == [(key, text)]


def test_the_hint_for_a_value_of_two_words_joins_them() -> None:
    with pytest.raises(UsageError, match="-genv needs a value: NAME VALUE, and -O2 looks like") as raised:
        run_parser().split(["-genv", "FLAGS", "-O2", "train.py"])
    assert raised.value.hint == "if -O2 is the value, join them by =: -genv=FLAGS=-O2"
